"""Prune a classifier by a peer's rules, train it on, and see how right it is."""

from __future__ import annotations

from typing import Any

from ltm.experiments.jobs import Pruned
from ltm.experiments.place import Place, perform


@perform.register
def prune(job: Pruned, place: Place) -> dict[str, Any]:
    """Raw values of a pruned classifier."""
    raise NotImplementedError
