"""One call a step: its torch definition, and beside it the Triton kernel that does it on GPUs."""

from ltm.kernels.attention import attend, attention_hints
from ltm.kernels.dispatch import compact, enable, is_recorded
from ltm.kernels.matching import Placement, Rule, Step, match, weigh
from ltm.kernels.merging import Groups, Merged, merge_grid, merge_groups, merge_matrix, widened

__all__ = [
    "Groups",
    "Merged",
    "Placement",
    "Rule",
    "Step",
    "attend",
    "attention_hints",
    "compact",
    "enable",
    "is_recorded",
    "match",
    "merge_grid",
    "merge_groups",
    "merge_matrix",
    "weigh",
    "widened",
]
