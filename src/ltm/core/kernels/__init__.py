"""Triton kernels. Each is the plain torch path in one pass over the tokens.

Imported only where they run: on a GPU, or in Triton's interpreter.
"""

from ltm.core.kernels.attention import attention, importance
from ltm.core.kernels.grids import merge_grid
from ltm.core.kernels.matching import assign, inform_and_assign
from ltm.core.kernels.merging import merge_groups, mix
from ltm.core.kernels.weighing import inform

__all__ = [
    "assign",
    "attention",
    "importance",
    "inform",
    "inform_and_assign",
    "merge_grid",
    "merge_groups",
    "mix",
]
