"""Triton kernels. Each is the plain torch path in one pass over the tokens.

Imported only where they run: on a GPU, or in Triton's interpreter.
"""

from ltm.core.kernels.attention import attention, importance
from ltm.core.kernels.grids import merge_grid
from ltm.core.kernels.matching import assign, merge_groups, mix
from ltm.core.kernels.weighing import by_attention, group_means, inform

__all__ = [
    "assign",
    "attention",
    "by_attention",
    "group_means",
    "importance",
    "inform",
    "merge_grid",
    "merge_groups",
    "mix",
]
