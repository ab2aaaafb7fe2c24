"""The type checker that jaxtyping's import hook applies to our modules under pytest."""

from typing import Any

from beartype import BeartypeConf, beartype

# As everywhere in Python's typing, an int will do where a float is asked for.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Any) -> Any:
    """Functions inside functions are left out: they would be decorated anew at every call."""
    return function if "<locals>" in function.__qualname__ else _check(function)
