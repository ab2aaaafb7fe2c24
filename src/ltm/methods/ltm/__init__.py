"""LTM: learnable token merging, with a step down the information-bottleneck bound in every block.

The mask of a site is `G = A (m e^s) / A^T (m e^s)`, where `A` is the support (`matched.py`,
`learned.py`), `m` are the token sizes, and `s` is one logit per token, which each site updates and
passes on (`step.py`).
"""

from ltm.methods.ltm.config import LTM, ByFamily
from ltm.methods.ltm.learned import Learned
from ltm.methods.ltm.matched import Matched
from ltm.methods.ltm.step import Informative

__all__ = ["LTM", "ByFamily", "Informative", "Learned", "Matched"]
