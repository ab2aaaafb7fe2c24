"""`ltm.evaluate`: how good a network is with and without merging, on the same images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ltm.api import (
    collect_statistics_,
    conversion_of,
    fit_,
    gmacs,
    is_merging,
    merging_copy,
    statistical_mergers,
    unmerged_copy,
)
from ltm.api.saving import telling_names
from ltm.api.zero_shot import open_zero_shot
from ltm.evaluation.accuracy import PairedDifference
from ltm.evaluation.bottleneck import overall
from ltm.evaluation.images import load_batches, open_images, sample_images
from ltm.evaluation.latency import BASE
from ltm.evaluation.measurement import Measurement, Measurements
from ltm.evaluation.records import describe, percent, points, text_table
from ltm.evaluation.settings import EvaluateSettings
from ltm.files import write_metrics
from ltm.models import (
    Network,
    Say,
    changed,
    method_config,
    name_of,
    open_model,
    read_class_names,
    refuse_given,
    silent,
    source_of,
    split_methods,
)
from ltm.processes import is_first, joined, local_device
from ltm.progress import Progress

_DEFAULTS = EvaluateSettings()


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluateResult:
    """Networks measured on the same images. Print it."""

    networks: tuple[Measurement, ...]
    """What was measured of each network, the untouched one first."""
    metrics: dict[str, Any]
    """All numbers as plain values; `models` has those of each network by its method."""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C stopped it: numbers are of the images seen until then."""
        return bool(self.metrics["interrupted"])

    def save(self, folder: str | Path) -> Path:
        """Write metrics.json."""
        write_metrics(Path(folder), self.metrics)
        return Path(folder)

    def __repr__(self) -> str:
        rows = self.metrics["models"]
        title = "{model}: {num_images} images of {data}".format(**self.metrics)
        lines = {
            label: [cell(row, rows[BASE]) for row in rows.values()]
            for label, cell in _LINES.items()
        }
        measured = [[label, *cells] for label, cells in lines.items() if any(cells)]
        parts = [title, text_table([["", *rows], *measured])]
        sites = _sites(rows)
        if len(sites) > 1:
            parts += ["", "IB loss / bound by block, in nats", text_table(sites)]
        if self.interrupted:
            parts.append("Interrupted: these numbers are of the images seen so far.")
        return "\n".join(parts)


def evaluate(
    model: Network,
    data: str,
    settings: EvaluateSettings = _DEFAULTS,
    *,
    say: Say = silent,
    **changes: Any,
) -> EvaluateResult:
    """Compare the accuracy and cost of methods on the same images.

    Differences are paired, image by image. Processes started by torchrun share the images, and all
    get the same result. Ctrl-C stops it and keeps the images seen so far.

    Args:
        model: a network or its name; one that merges is compared with itself without merging.
        data: folder or .zip of class folders, tar shards, hf:NAME, or shapes (generated).
        settings: what is compared, and on which images.
        say: called with each line of progress.
        changes: changes of the settings, such as `methods=("tome",)`.
    """
    settings = changed(settings, changes)
    where = local_device(settings.device)
    dataset = open_images(data, settings.split, settings.images)
    others = None
    if settings.statistics is not None:
        others = open_images(settings.statistics, settings.split)
    merges = bool(settings.methods) or settings.bottleneck
    if settings.zero_shot:
        network = _zero_shot(model, dataset.class_names, settings).to(where)
    else:
        network = open_model(model, where, merges=merges, say=say)
    models = _networks(network, settings)
    with joined(where) as process:
        placed: dict[str, Any] = {"batch_size": settings.batch_size, "workers": settings.workers}
        placed |= {"device": where, **process._asdict()}
        batches = load_batches(dataset, data, network, **placed)
        if not is_merging(network):
            few, source = (dataset, data) if others is None else (others, settings.statistics)
            _fit_(models, lambda: sample_images(few, str(source), network))
        if others is not None:
            more = load_batches(others, str(settings.statistics), network, labelled=False, **placed)
            _collect_(models, more, say)
        measured = Measurements(models, quiet=say is silent or not is_first())
        interrupted = False
        try:
            measured.measure_accuracy(batches)
            if settings.bottleneck:
                measured.measure_bottleneck(batches, beta=settings.beta)
        except KeyboardInterrupt:
            if not measured.outputs:
                raise
            interrupted = True
        rows = measured.rows(lambda: sample_images(dataset, data, network))
    against = {name: measured.difference(name, BASE) for name in models}
    return EvaluateResult(
        networks=rows,
        metrics={
            "data": data,
            "split": settings.split,
            "model": name_of(model),
            "beta": settings.beta,
            "interrupted": interrupted,
            "environment": asdict(describe(where)),
            "num_images": len(measured.outputs[BASE].correct),
            "models": {
                row.method: _numbers(row, gmacs(models[row.method]), against[row.method])
                for row in rows
            },
        },
    )


def _zero_shot(model: Network, found: Sequence[str], settings: EvaluateSettings) -> nn.Module:
    """A classifier of the data's classes, or of those in a file."""
    source = source_of(model)
    if source is None or source.model is None:
        raise ValueError("zero_shot: give the model by its name, hf:NAME or open_clip:NAME:TAG")
    names = found if settings.class_names is None else read_class_names(settings.class_names)
    if telling_names(names) is None:
        raise ValueError(
            "zero_shot: the data's classes are numbers; give --class-names FILE, a name a line"
        )
    return open_zero_shot(source.model, names, settings.templates)


def _networks(model: nn.Module, settings: EvaluateSettings) -> dict[str, nn.Module]:
    """The untouched network, and what is compared with it."""
    texts = split_methods(settings.methods)
    if is_merging(model):
        refuse_given({"methods": texts, "ratio": settings.ratio}, "a saved run")
        return {BASE: unmerged_copy(model), conversion_of(model).config.name: model}
    if settings.ratio is not None and not texts:
        raise ValueError("--ratio goes with --methods: give both, or leave the ratio out")
    merging = {text: merging_copy(model, method_config(text, settings.ratio)) for text in texts}
    return {BASE: model, **merging}


def _fit_(models: Mapping[str, nn.Module], sample: Callable[[], Tensor]) -> None:
    """Fit methods that meet their ratio as a mean on a sample of images."""
    for model in models.values():
        if is_merging(model) and conversion_of(model).config.needs_images():
            fit_(model, sample(), tolerance=0.02)


def _collect_(models: Mapping[str, nn.Module], batches: Any, say: Say) -> None:
    """Collect class statistics from the networks' own predictions, for methods that use them."""
    for name, model in models.items():
        if statistical_mergers(model):
            loop = Progress(f"statistics of {name}", silent=say is silent)
            collect_statistics_(model, _Unlabelled(batches), progress=loop)
            if loop.interrupted:
                raise KeyboardInterrupt


class _Unlabelled:
    """Batches without their labels; they can be iterated more than once."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return (images for images, _ in self.batches)


def _numbers(row: Measurement, planned: float, against: PairedDifference) -> dict[str, Any]:
    """All numbers of one network as plain values; `planned` are GMACs with nothing idle."""
    assert row.accuracy is not None
    last = overall(row.bottleneck).get(row.method)
    return {
        "parameters": row.parameters,
        "gmacs": planned,
        "measured_gmacs": row.gmacs,
        **asdict(row.accuracy),
        "against_base": asdict(against),
        "bottleneck": {
            "overall": None if last is None else asdict(last),
            "sites": [asdict(site) for site in row.bottleneck],
        },
    }


def _nats(row: dict[str, Any], name: str) -> str:
    last = row["bottleneck"]["overall"]
    return "" if last is None else f"{last[name]:.3f}"


def _paired(row: dict[str, Any]) -> str:
    against = row["against_base"]
    return f"{points(against['low'])} to {points(against['high'])}"


_LINES: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "parameters (M)": lambda row, _: f"{row['parameters'] / 1e6:.2f}",
    "GMACs": lambda row, _: f"{row['measured_gmacs']:.3f}",
    "share of MACs": lambda row, base: f"{row['measured_gmacs'] / base['measured_gmacs']:.3f}",
    "top-1 (%)": lambda row, _: percent(row["top1"]),
    "against base": lambda row, _: points(row["against_base"]["difference"]),
    "95% interval": lambda row, base: "" if row is base else _paired(row),
    "top-5 (%)": lambda row, _: percent(row["top5"]),
    "agreement (%)": lambda row, _: percent(row["agreement"]),
    "divergence (nats)": lambda row, _: f"{row['divergence']:.4f}",
    "calibration error (%)": lambda row, _: percent(row["calibration_error"]),
    "IB loss (nats)": lambda row, _: _nats(row, "loss"),
    "IB bound (nats)": lambda row, _: _nats(row, "bound"),
}


def _sites(rows: Mapping[str, Any]) -> list[list[str]]:
    cells: dict[int, dict[str, str]] = {}
    for name, row in rows.items():
        for site in row["bottleneck"]["sites"]:
            text = f"{site['loss']:.3f} / {site['bound']:.3f}"
            cells.setdefault(site["block"], {})[name] = text
    table = [[str(block), *(at.get(name, "") for name in rows)] for block, at in cells.items()]
    return [["block", *rows], *sorted(table, key=lambda line: int(line[0]))]
