"""Detection with SSDLite, instance segmentation with Mask R-CNN."""

from __future__ import annotations

from ltm.detection.settings import DetectionSettings
from reproduction.scales.base import Backbone, Scale
from reproduction.tables.base import (
    GMACS,
    PARAMETERS,
    Claim,
    Column,
    Experiment,
    Picture,
    Row,
    Table,
    cell,
    claim,
    row,
)
from reproduction.tables.shared_jobs import detector, label, paper_label

_SEGMENTATION = {
    f"{kind} {score}": (measure, of)
    for kind, measure in (("box", "box_precision"), ("mask", "mask_precision"))
    for score, of in (("mAP", "ap"), ("AP50", "ap50"), ("AP75", "ap75"))
}


def detection(scale: Scale) -> Table:
    """Average precision of SSDLite by backbone."""
    columns = (PARAMETERS, GMACS, Column(name="mAP", better="higher"))
    return _table(
        "detection",
        columns,
        measures={"mAP": ("box_precision", "ap")},
        backbones=scale.detectors,
        settings=scale.detection,
        scale=scale,
    )


def segmentation(scale: Scale) -> Table:
    """Average precision of Mask R-CNN by backbone."""
    columns = (
        PARAMETERS,
        GMACS,
        *(Column(name=name, better="higher") for name in _SEGMENTATION),
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
        for method in ("none", "ltm") if backbone.merges else ("none",):
            jobs = [detector(settings, backbone, method, scale, seed) for seed in scale.seeds]
            cells = {
                PARAMETERS.name: cell("parameters", jobs[:1]),
                GMACS.name: cell("gmacs", jobs[:1]),
            }
            cells |= {column: cell(m, jobs, of) for column, (m, of) in measures.items()}
            rows.append(row(name, label(method, backbone), paper_label(method, backbone), cells))
        if backbone.merges:
            claims += [
                claim(rows, label("ltm", backbone), label("none", backbone), column, "higher")
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


EXPERIMENTS = (
    Experiment(
        name="detection", item="Table 3", title="Object detection with SSDLite", declare=detection
    ),
    Experiment(
        name="segmentation",
        item="Table 4",
        title="Instance segmentation with Mask R-CNN",
        declare=segmentation,
    ),
)
