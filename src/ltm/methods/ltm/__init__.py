"""LTM: learnable token merging, a step down the information-bottleneck bound in every block.

The mask of a site is `G = A (m e^s) / A^T (m e^s)`: a support `A` (`matched.py`, `learned.py`),
token sizes `m`, and `s`, one logit per token that the sites hand on (`step.py`).
"""

from ltm.methods.ltm.config import LTM, ByFamily
from ltm.methods.ltm.learned import Learned
from ltm.methods.ltm.matched import Matched
from ltm.methods.ltm.step import Informative

__all__ = ["LTM", "ByFamily", "Informative", "Learned", "Matched"]
