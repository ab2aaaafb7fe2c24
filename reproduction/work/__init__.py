"""How each kind of job is run; importing this registers all of them."""

from reproduction.work import bottleneck, classify, detect, heatmaps, prune, race

__all__ = ["bottleneck", "classify", "detect", "heatmaps", "prune", "race"]
