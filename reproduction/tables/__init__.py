"""All declared experiments by name."""

from ltm.models import did_you_mean
from reproduction.tables import bottlenecks, classification, detection, supplement
from reproduction.tables.base import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for module in (classification, detection, bottlenecks, supplement)
    for experiment in module.EXPERIMENTS
}


def find_experiments(name: str) -> list[Experiment]:
    """One experiment, or all of them; a ValueError suggests names where there is none."""
    if name == "all":
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        known = [*EXPERIMENTS, "all", "list", "beside"]
        raise ValueError(f"no table is named {name}: {did_you_mean(name, known)}")
    return [EXPERIMENTS[name]]
