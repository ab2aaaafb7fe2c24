"""Detection with SSDLite, instance segmentation with Mask R-CNN."""

from __future__ import annotations

from ltm.detection.settings import DetectionSettings
from reproduction.scales.base import Backbone, Scale
from reproduction.tables.base import (
    GMACS,
    PARAMETERS,
    Claim,
    Column,
    Picture,
    Row,
    Table,
    cell,
    claim,
    experiment,
    sizes,
)
from reproduction.tables.shared_jobs import OURS, detector, label, method_row

SECONDS = Column(name="s/epoch", digits=1)
_SEGMENTATION = {
    f"{kind} {score}": (measure, of)
    for kind, measure in (("box", "box_precision"), ("mask", "mask_precision"))
    for score, of in (("mAP", "ap"), ("AP50", "ap50"), ("AP75", "ap75"))
}


@experiment("detection", item="Table 3", title="Object detection with SSDLite")
def detection(scale: Scale) -> Table:
    """Average precision of SSDLite by backbone."""
    columns = (PARAMETERS, GMACS, SECONDS, Column(name="mAP", better="higher", points=True))
    return _table(
        "detection",
        columns,
        measures={"mAP": ("box_precision", "ap")},
        backbones=scale.detectors,
        settings=scale.detection,
        scale=scale,
    )


@experiment("segmentation", item="Table 4", title="Instance segmentation with Mask R-CNN")
def segmentation(scale: Scale) -> Table:
    """Average precision of Mask R-CNN by backbone."""
    columns = (
        PARAMETERS,
        GMACS,
        SECONDS,
        *(Column(name=name, better="higher", points=True) for name in _SEGMENTATION),
    )
    return _table(
        "segmentation",
        columns,
        measures=_SEGMENTATION,
        backbones=scale.segmenters,
        settings=scale.segmentation,
        scale=scale,
    )


def _table(
    name: str,
    columns: tuple[Column, ...],
    *,
    measures: dict[str, tuple[str, str]],
    backbones: tuple[Backbone, ...],
    settings: DetectionSettings,
    scale: Scale,
) -> Table:
    rows: list[Row] = []
    claims: list[Claim] = []
    for backbone in backbones:
        for method in ("none", *OURS) if backbone.merges else ("none",):
            jobs = [detector(settings, backbone, method, scale, seed) for seed in scale.seeds]
            cells = sizes(jobs) | {SECONDS.name: cell("epoch_seconds", jobs)}
            cells |= {c: cell(m, jobs, of) for c, (m, of) in measures.items()}
            rows.append(method_row(name, method, backbone, cells))
        if backbone.merges:
            claims += [
                claim(rows, label(method, backbone), label("none", backbone), column, "higher")
                for method in OURS
                for column in measures
            ]
    first = next(iter(measures))
    return Table(
        columns=columns,
        rows=tuple(rows),
        claims=tuple(claims),
        pictures=(Picture(kind="points", column=first, name="precision"),),
        notes=(f"Images: {settings.data.source.rpartition('/')[2]}.",),
    )
