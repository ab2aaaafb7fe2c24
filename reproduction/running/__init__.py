"""How jobs are run; importing this package registers every kind of job."""

from reproduction.running import measuring, training

__all__ = ["measuring", "training"]
