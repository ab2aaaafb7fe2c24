"""All declared experiments by name."""

from ltm.models import did_you_mean
from reproduction.tables import bottlenecks, classification, detection, supplement
from reproduction.tables.base import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    made.name: made
    for module in (classification, detection, bottlenecks, supplement)
    for made in vars(module).values()
    if isinstance(made, Experiment)
}


def find_experiments(name: str) -> list[Experiment]:
    """One experiment, or all of them; a ValueError suggests names where there is none."""
    if name == "all":
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        known = [*EXPERIMENTS, "all", "list", "beside"]
        raise ValueError(f"no table is named {name}: {did_you_mean(name, known)}")
    return [EXPERIMENTS[name]]
