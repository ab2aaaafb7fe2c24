"""All declared experiments by name."""

from ltm.models import did_you_mean
from reproduction.tables import bottlenecks, classification, detection, supplement
from reproduction.tables.base import Experiment

_ORDER = (
    "finetune", "ib-finetune", "scratch", "ib-scratch", "sweep", "layers", "ib-layers", "losses",
    "lora", "transfer", "heatmaps", "detection", "segmentation", "throughput",
)  # fmt: skip
"""What tells most comes first: tables are run in this order."""

EXPERIMENTS: dict[str, Experiment] = {
    made.name: made
    for made in sorted(
        (
            made
            for module in (classification, detection, bottlenecks, supplement)
            for made in vars(module).values()
            if isinstance(made, Experiment)
        ),
        key=lambda made: _ORDER.index(made.name),
    )
}


def find_experiments(name: str) -> list[Experiment]:
    """One experiment, or all of them; a ValueError suggests names where there is none."""
    if name == "all":
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        known = [*EXPERIMENTS, "all", "list", "beside"]
        raise ValueError(f"no table is named {name}: {did_you_mean(name, known)}")
    return [EXPERIMENTS[name]]
