"""Triton kernels. Each is the plain torch path in one pass over the tokens.

Imported only where they run: on a GPU, or in Triton's interpreter.
"""

from ltm.core.kernels.attention import attention, importance
from ltm.core.kernels.matching import assign, merge_groups, mix
from ltm.core.kernels.weighing import by_attention, inform, pool

__all__ = [
    "assign",
    "attention",
    "by_attention",
    "importance",
    "inform",
    "merge_groups",
    "mix",
    "pool",
]
