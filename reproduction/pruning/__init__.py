"""Pruning peers of the scratch table: S2ViTE, SPViT and SAViT on EfficientViT.

Written from the ideas of their papers, for a network that none of them was made for: our reading,
not their code. All three are given a share of the MACs, counted as everything else here is.
"""

from reproduction.pruning.s2vite import s2vite_
from reproduction.pruning.savit import savit_
from reproduction.pruning.spvit import spvit_

PEERS = {"s2vite": s2vite_, "spvit": spvit_, "savit": savit_}

__all__ = ["PEERS", "s2vite_", "savit_", "spvit_"]
