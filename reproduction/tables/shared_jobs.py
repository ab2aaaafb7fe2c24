"""Rows and jobs that several tables ask for: base, converted, tuned and scratch networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ltm.detection.settings import DetectionSettings
from ltm.training.settings import TrainSettings
from reproduction.jobs import Bottleneck, Classifier, Detector
from reproduction.scales.base import Backbone, Network, Scale
from reproduction.tables.base import Cell, Row, row

NAMES = {"none": "", "tome": "ToMe-", "tofu": "ToFu-", "ltmp": "LTMP-", "ltm": "LTM-"}


def label(method: str, network: Network | Backbone) -> str:
    """A row's label, as the paper writes it."""
    return f"{NAMES[method]}{network.label}"


def paper_label(method: str, network: Network | Backbone) -> str:
    """The label of the paper's row that stands beside."""
    return f"{NAMES[method]}{network.stands_for}"


def method_row(
    table: str, method: str, network: Network | Backbone, cells: Mapping[str, Cell]
) -> Row:
    """The row of a method on a network, with the paper's numbers."""
    return row(table, label(method, network), paper_label(method, network), cells)


def seeds_of(network: Network, method: str, scale: Scale) -> tuple[int, ...]:
    """Seeds of an untrained row: one where the published weights leave nothing to chance."""
    trains = method in ("ltm", "ltmp")
    return scale.seeds if trains or not network.pretrained else scale.seeds[:1]


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
    return Classifier(settings=settings, start=start, trains=False)


def ratio_of(network: Network, method: str, scale: Scale) -> float:
    """The share of the MACs that LTM keeps, or one of its peers."""
    return network.shares.get(method, scale.ratio if method == "ltm" else scale.peer_ratio)


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


def from_scratch(network: Network, ratio: float, seed: int) -> Classifier:
    """LTM trained from the beginning."""
    return Classifier(settings=with_seed(with_method(network.scratch, "ltm", ratio), seed))


def scratch_jobs(network: Network, scale: Scale) -> list[Classifier]:
    """LTM trained from the beginning at its usual share, of all seeds."""
    ratio = ratio_of(network, "ltm", scale)
    return [from_scratch(network, ratio, seed) for seed in scale.seeds]


def bottleneck(job: Classifier, epoch: int | None = None) -> Bottleneck:
    """The bottleneck of a network."""
    return Bottleneck(of=job, epoch=epoch)


def detector(
    settings: DetectionSettings, backbone: Backbone, method: str, scale: Scale, seed: int
) -> Detector:
    """A detector on a backbone."""
    kind: Any = method
    return Detector(
        settings=replace(
            settings,
            detector=replace(settings.detector, backbone=backbone.name),
            merge=replace(
                settings.merge, method=kind, ratio=None if method == "none" else scale.ratio
            ),
            run=replace(settings.run, seed=seed),
        )
    )


def with_method(settings: TrainSettings, method: str, ratio: float | None) -> TrainSettings:
    """Settings with another method; options of LTM's own do not go over to others."""
    kind: Any = method
    options = settings.merge.method_options if method == "ltm" else ()
    warm = settings.merge.warm_epochs if method == "ltm" else 0
    return replace(
        settings,
        merge=replace(
            settings.merge, method=kind, ratio=ratio, method_options=options, warm_epochs=warm
        ),
    )


def with_seed(settings: TrainSettings, seed: int) -> TrainSettings:
    """Settings with another seed."""
    return replace(settings, run=replace(settings.run, seed=seed))


def started(settings: TrainSettings) -> TrainSettings:
    """Settings of a job that starts from another one's network, and from no other weights."""
    return replace(settings, model=replace(settings.model, pretrained=False, weights=None))
