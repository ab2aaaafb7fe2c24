"""Rows and jobs that several tables ask for: base, converted, tuned and scratch networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ltm.detection.settings import DetectionSettings
from ltm.training.settings import TrainSettings
from reproduction.jobs import Bottleneck, Classifier, Detector
from reproduction.scales.base import Backbone, Network, Scale
from reproduction.tables.base import Cell, Row, row


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """What a row of a table is about: a method and the form of it."""

    method: str
    title: str
    papers: str
    """What the paper calls it."""
    options: tuple[str, ...] = ()
    same_sites: bool = False
    """It merges where LTM (matched) does, and keeps as many tokens."""


def _peer(method: str, title: str) -> dict[str, Entrant]:
    """A method that trains nothing: as published, and where LTM merges."""
    return {
        method: Entrant(method=method, title=title, papers=title),
        f"{method}-same": Entrant(
            method=method, title=f"{title} (LTM's sites)", papers="", same_sites=True
        ),
    }


ENTRANTS = {
    "none": Entrant(method="none", title="", papers=""),
    **_peer("tome", "ToMe"),
    **_peer("tofu", "ToFu"),
    "ltmp": Entrant(method="ltmp", title="LTMP", papers="LTMP"),
    "learned": Entrant(
        method="ltm", title="LTM (learned mask)", papers="LTM", options=("support=learned",)
    ),
    "matched": Entrant(
        method="ltm", title="LTM (matched)", papers="LTM", options=("support=matching",)
    ),
    "letter": Entrant(
        method="ltm",
        title="LTM (learned mask, letter)",
        papers="LTM",
        options=(
            "support=learned", "candidates=all", "mask_form=letter", "by_size=False", "step=raw",
        ),
    ),
}  # fmt: skip
"""All entrants: LTM as the paper has it, as we have it, and in the paper's letter."""
OURS = ("learned", "matched")
"""The paper's own mask, and ours: what every claim about LTM is asked of."""


def _named(title: str, network: str) -> str:
    return f"{title}-{network}" if title else network


def label(entrant: str, network: Network | Backbone) -> str:
    """A row's label, as the paper writes it, with the form of LTM."""
    return _named(ENTRANTS[entrant].title, network.label)


def paper_label(entrant: str, network: Network | Backbone) -> str:
    """The label of the paper's row that stands beside; empty where there is none."""
    found = ENTRANTS[entrant]
    return "" if found.same_sites else _named(found.papers, network.stands_for)


def method_row(
    table: str, method: str, network: Network | Backbone, cells: Mapping[str, Cell]
) -> Row:
    """The row of a method on a network, with the paper's numbers."""
    return row(table, label(method, network), paper_label(method, network), cells)


def seeds_of(network: Network, scale: Scale) -> tuple[int, ...]:
    """Seeds of an untrained row: one where the published weights leave nothing to chance."""
    return scale.seeds[:1] if network.pretrained else scale.seeds


def base(network: Network, seed: int) -> Classifier:
    """The untouched network: published, or trained from scratch."""
    if network.pretrained:
        settings = with_method(network.tune, "none", None)
        return Classifier(settings=with_seed(settings, 0), trains=False)
    return base_from_scratch(network, seed)


def base_from_scratch(network: Network, seed: int) -> Classifier:
    """The untouched network, trained here even where there is a published one."""
    settings = with_method(network.scratch, "none", None)
    return Classifier(settings=with_seed(settings, seed))


def converted(network: Network, method: str, ratio: float, seed: int) -> Classifier:
    """The untouched network with tokens merged, nothing trained."""
    if method == "none":
        return base(network, seed)
    settings = with_seed(started(with_method(network.tune, method, ratio)), seed)
    start = base(network, seed)
    if network.pretrained:
        settings = with_seed(settings, 0)
    sites = None
    if ENTRANTS[method].same_sites:
        sites = with_method(network.tune, "matched", ratio).merge
    return Classifier(settings=settings, start=start, trains=False, sites_of=sites)


def ratio_of(network: Network, method: str, scale: Scale) -> float:
    """The share of the MACs that LTM keeps, or one of its peers; where LTM merges, LTM's."""
    found = ENTRANTS[method]
    own = found.method == "ltm" or found.same_sites
    return network.shares.get("ltm" if own else method, scale.ratio if own else scale.peer_ratio)


def tuned(
    network: Network, method: str, ratio: float | None, epochs: int, seed: int, **changes: Any
) -> Classifier:
    """The untouched network with tokens merged and its mask modules trained."""
    settings = with_seed(started(with_method(network.tune, method, ratio)), seed)
    settings = replace(settings, optim=replace(settings.optim, epochs=epochs))
    layer = changes.pop("layer", None)
    for group, values in changes.items():
        settings = replace(settings, **{group: replace(getattr(settings, group), **values)})
    return Classifier(settings=settings, start=base(network, seed), layer=layer)


def from_scratch(network: Network, method: str, ratio: float, seed: int) -> Classifier:
    """LTM trained from the beginning."""
    return Classifier(settings=with_seed(with_method(network.scratch, method, ratio), seed))


def scratch_jobs(network: Network, method: str, scale: Scale) -> list[Classifier]:
    """LTM trained from the beginning at its usual share, or the network itself, of all seeds."""
    if method == "none":
        return [base_from_scratch(network, seed) for seed in scale.seeds]
    ratio = ratio_of(network, method, scale)
    return [from_scratch(network, method, ratio, seed) for seed in scale.seeds]


def bottleneck(job: Classifier, epoch: int | None = None) -> Bottleneck:
    """The bottleneck of a network."""
    return Bottleneck(of=job, epoch=epoch)


def detector(
    settings: DetectionSettings, backbone: Backbone, method: str, scale: Scale, seed: int
) -> Detector:
    """A detector on a backbone."""
    found = ENTRANTS[method]
    return Detector(
        settings=replace(
            settings,
            detector=replace(settings.detector, backbone=backbone.name),
            merge=replace(
                settings.merge,
                method=found.method,
                ratio=None if method == "none" else scale.ratio,
                method_options=found.options,
            ),
            run=replace(settings.run, seed=seed),
        )
    )


def with_method(settings: TrainSettings, method: str, ratio: float | None) -> TrainSettings:
    """Settings with another method; first epochs without merging are LTM's own."""
    found = ENTRANTS[method]
    warm = settings.merge.warm_epochs if found.method == "ltm" else 0
    return replace(
        settings,
        merge=replace(
            settings.merge,
            method=found.method,
            ratio=ratio,
            method_options=found.options,
            warm_epochs=warm,
        ),
    )


def with_seed(settings: TrainSettings, seed: int) -> TrainSettings:
    """Settings with another seed."""
    return replace(settings, run=replace(settings.run, seed=seed))


def started(settings: TrainSettings) -> TrainSettings:
    """Settings of a job that starts from another one's network, and from no other weights."""
    return replace(settings, model=replace(settings.model, pretrained=False, weights=None))
