"""LTM: learnable token merging, a step down the information-bottleneck bound in every block.

The mask of a site is `G = A (m e^s) / A^T (m e^s)`: a support `A` (`matching.py`, `learned.py`),
token sizes `m`, and `s`, one logit per token that the sites hand on (`step.py`).
"""

from ltm.methods.ltm.config import LTM

__all__ = ["LTM"]
