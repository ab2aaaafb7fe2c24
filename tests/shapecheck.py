"""The type checker that jaxtyping's import hook applies to our modules under pytest."""

from beartype import BeartypeConf, beartype

# As everywhere in Python's typing, an int will do where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
