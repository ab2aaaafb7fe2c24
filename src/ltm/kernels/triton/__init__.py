"""Triton kernels, each with the result of a torch definition in `core`.

They are imported only if they run: on a GPU, or in Triton's interpreter.
"""

from ltm.kernels.triton.attention import (
    attention,
    attention_of,
    importance,
    importance_of,
    turned,
)
from ltm.kernels.triton.grids import merge_grid
from ltm.kernels.triton.matching import assign, inform_and_assign
from ltm.kernels.triton.merging import gather, merge_groups
from ltm.kernels.triton.weighing import inform

__all__ = [
    "assign",
    "attention",
    "attention_of",
    "gather",
    "importance",
    "importance_of",
    "inform",
    "inform_and_assign",
    "merge_grid",
    "merge_groups",
    "turned",
]
