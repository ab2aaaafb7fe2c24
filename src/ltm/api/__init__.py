"""The door: convert a model, look at it, freeze it, save it, undo it."""

from ltm.adapters import Conversion
from ltm.adapters.blocks import Record
from ltm.api.conversion import (
    ConversionReport,
    announcing,
    conversion_of,
    gmacs,
    image_size_of,
    is_merging,
    merge_maps,
    merge_tokens_,
    mergers,
    merging_network,
    merging_off,
    reconvert_,
    report,
    set_ratio_,
    token_counts,
    unmerge_tokens_,
    watching,
)
from ltm.api.fitting import (
    MacShare,
    collect_statistics_,
    fit_,
    mac_share,
    measure_share,
    observe_,
)
from ltm.api.graphs import Captured, capture
from ltm.api.saving import freeze_, load, save

__all__ = [
    "Captured",
    "Conversion",
    "ConversionReport",
    "MacShare",
    "Record",
    "announcing",
    "capture",
    "collect_statistics_",
    "conversion_of",
    "fit_",
    "freeze_",
    "gmacs",
    "image_size_of",
    "is_merging",
    "load",
    "mac_share",
    "measure_share",
    "merge_maps",
    "merge_tokens_",
    "mergers",
    "merging_network",
    "merging_off",
    "observe_",
    "reconvert_",
    "report",
    "save",
    "set_ratio_",
    "token_counts",
    "unmerge_tokens_",
    "watching",
]
