"""`ltm evaluate`: how good a network is with and without merging, on the same images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltm.evaluation.images import load_batches, open_images, sample_images
from ltm.files import check_folder, write_metrics
from ltm.models import (
    ModelSource,
    method_config,
    num_classes_of,
    refuse_given,
    split_methods,
)
from ltm.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from ltm.evaluation.accuracy import Outputs
    from ltm.evaluation.bottleneck import SiteBottleneck

BASE = "base"
_SAMPLE = 64
"""Images on which a method is fitted, and its share of the MACs is measured."""


def evaluate(
    *,
    data: str,
    model: str | None = None,
    pretrained: bool = False,
    weights: Path | None = None,
    run: Path | None = None,
    methods: tuple[str, ...] = (),
    ratio: float | None = None,
    split: str = "val",
    images: int | None = None,
    statistics: str | None = None,
    bottleneck: bool = True,
    beta: float = 10.0,
    num_classes: int | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    batch_size: int = 64,
    workers: int = 2,
    device: str = "auto",
    output: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Measure accuracy, cost and information bottleneck of a network, merged and untouched.

    Prints parameters, GMACs, top-1 and top-5 with 95% intervals, agreement with the untouched
    network and divergence from its outputs, calibration error, and the information-bottleneck loss
    and bound of every block. All networks see the same images, so differences are paired. On
    several processes: torchrun --nproc-per-node 2 --no-python ltm evaluate ...

    Example:
        ltm evaluate --data imagenet/val --model vit_small_patch16_224 --pretrained
            --methods tome,ltm --ratio 0.7 --output runs/evaluation

    Args:
        data: folder or .zip of class folders, tar shards, hf:NAME, or shapes (generated).
        model: timm's name of the network.
        pretrained: take timm's own weights.
        weights: take those of a file in timm's keys, .safetensors or .pth.
        run: evaluate a saved network instead, against itself without merging.
        methods: methods to convert to, such as tome,ltm or ltm:support=learned,sites=3+5+8.
        ratio: share of the multiply-adds that may remain, 0.7 unless given.
        split: split of the data, where it has several.
        images: evaluate this many images instead of all.
        statistics: images, as in --data, whose class statistics LTM weighs tokens by; labels are
            not used. Without them LTM weighs tokens by size and attention.
        bottleneck: measure the information bottleneck.
        beta: sharpness of the soft class membership.
        num_classes: by default what the weights have.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        batch_size: images per batch and process.
        workers: loader processes.
        device: auto, cpu, cuda or cuda:N.
        output: folder for metrics.json.
        overwrite: replace another run's results there.
    """
    check_folder(output, overwrite=overwrite)

    from ltm.evaluation import accuracy, environment
    from ltm.evaluation.accuracy import as_row
    from ltm.evaluation.bottleneck import measure_bottleneck
    from ltm.processes import joined, local_device

    where = local_device(device)
    dataset = open_images(data, split, images)
    others = None if statistics is None else open_images(statistics, split)
    loaded = ModelSource(
        model=model,
        pretrained=pretrained,
        weights=weights,
        run=run,
        num_classes=num_classes,
        image_size=image_size,
        model_args=model_args,
    ).load(merges=bool(methods) or bottleneck)
    models = {name: m.to(where) for name, m in entrants(loaded, methods, ratio).items()}
    with joined(where) as process:
        options = {"batch_size": batch_size, "workers": workers, "device": where}
        options |= process._asdict()
        batches = load_batches(dataset, data, loaded, **options)
        if run is None:
            few = others or dataset
            meet_ratios_(models, lambda: sample_images(few, statistics or data, loaded, _SAMPLE))
        if others is not None:
            more = load_batches(others, statistics or data, loaded, labelled=False, **options)
            collect_(models, more)
        loop = Progress("accuracy", silent=not process.speaks)
        outputs = accuracy.evaluate(models, batches, original=BASE, progress=loop)
        sites: list[SiteBottleneck] = []
        if bottleneck and not loop.interrupted:
            loop = Progress("information bottleneck", silent=not process.speaks)
            classes = num_classes_of(loaded)
            sites = measure_bottleneck(models, batches, classes, beta=beta, progress=loop)
        if not process.speaks:
            return
        metrics = describe(models, outputs, sites, sample_images(dataset, data, loaded, _SAMPLE))
    metrics = {
        "data": data,
        "split": split,
        "model": model or str(run),
        "beta": beta,
        "interrupted": loop.interrupted,
        "environment": as_row(environment.describe(where)),
        **metrics,
    }
    show(metrics)
    write_metrics(output, metrics)


def entrants(
    model: nn.Module, methods: tuple[str, ...], ratio: float | None
) -> dict[str, nn.Module]:
    """The untouched network, and what is compared with it."""
    from ltm.api import conversion_of, is_merging, merge_tokens_, unmerge_tokens_

    texts = split_methods(methods)
    if is_merging(model):
        refuse_given({"methods": texts, "ratio": ratio}, "a saved run")
        base = copy.deepcopy(model)
        unmerge_tokens_(base)
        return {BASE: base, conversion_of(model).config.name: model}
    found = {BASE: model}
    for text in texts:
        merging = copy.deepcopy(model)
        merge_tokens_(merging, method_config(text, ratio))
        found[text] = merging
    return found


def meet_ratios_(models: dict[str, nn.Module], sample: Callable[[], Any]) -> None:
    """Fit methods that meet their ratio as a mean on a sample of images."""
    from ltm.api import conversion_of, fit_, is_merging

    for model in models.values():
        if is_merging(model) and conversion_of(model).config.needs_images():
            fit_(model, sample(), tolerance=0.02)


def collect_(models: dict[str, nn.Module], batches: Any) -> None:
    """Class statistics, from the networks' own predictions, where a method keeps some."""
    from ltm.api import collect_statistics_, is_merging, mergers

    class Unlabelled:
        def __iter__(self) -> Any:
            return (images for images, _ in batches)

    for name, model in models.items():
        keeps = (merger.keeps_statistics for _, merger in mergers(model))
        if is_merging(model) and any(keeps):
            collect_statistics_(model, Unlabelled(), progress=Progress(f"statistics of {name}"))


def describe(
    models: dict[str, nn.Module],
    outputs: dict[str, Outputs],
    sites: list[SiteBottleneck],
    sample: Any,
) -> dict[str, Any]:
    """All numbers as plain values."""
    from ltm.api import gmacs, mergers
    from ltm.evaluation.accuracy import as_row, paired_interval, summarise
    from ltm.evaluation.bottleneck import overall
    from ltm.evaluation.cost import measured_gmacs, num_parameters

    last = overall(sites)
    rows: dict[str, Any] = {}
    for name, model in models.items():
        varies = any(merger.own_counts for _, merger in mergers(model))
        rows[name] = {
            "parameters": num_parameters(model),
            "gmacs": gmacs(model),
            "measured_gmacs": measured_gmacs(model, sample if varies else sample[:1]),
            **as_row(summarise(outputs[name])),
            "against_base": as_row(paired_interval(outputs[name].correct, outputs[BASE].correct)),
            "bottleneck": {
                "overall": as_row(last[name]) if name in last else None,
                "sites": [as_row(site) for site in sites if site.model == name],
            },
        }
    return {"num_images": len(outputs[BASE].correct), "models": rows}


def show(metrics: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    rows = metrics["models"]
    table = Table(title=f"{metrics['model']}: {metrics['num_images']} images of {metrics['data']}")
    table.add_column("")
    for name in rows:
        table.add_column(name, justify="right", overflow="fold")
    for label, cell in _LINES.items():
        table.add_row(label, *(cell(row, rows[BASE]) for row in rows.values()))
    console.print(table)
    _show_sites(console, rows)
    if metrics["interrupted"]:
        console.print("Interrupted: these numbers are of the images seen so far.")


def _per_cent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.2f}"


def _nats(row: dict[str, Any], name: str) -> str:
    last = row["bottleneck"]["overall"]
    return "" if last is None else f"{last[name]:.3f}"


def _paired(row: dict[str, Any]) -> str:
    against = row["against_base"]
    return f"{_per_cent(against['low'], '+')} to {_per_cent(against['high'], '+')}"


_LINES: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "parameters (M)": lambda row, _: f"{row['parameters'] / 1e6:.2f}",
    "GMACs": lambda row, _: f"{row['measured_gmacs']:.3f}",
    "share of MACs": lambda row, base: f"{row['measured_gmacs'] / base['measured_gmacs']:.3f}",
    "top-1 (%)": lambda row, _: _per_cent(row["top1"]),
    "against base": lambda row, _: _per_cent(row["against_base"]["difference"], "+"),
    "95% interval": lambda row, base: "" if row is base else _paired(row),
    "top-5 (%)": lambda row, _: _per_cent(row["top5"]),
    "agreement (%)": lambda row, _: _per_cent(row["agreement"]),
    "divergence (nats)": lambda row, _: f"{row['divergence']:.4f}",
    "calibration error (%)": lambda row, _: _per_cent(row["calibration_error"]),
    "IB loss (nats)": lambda row, _: _nats(row, "loss"),
    "IB bound (nats)": lambda row, _: _nats(row, "bound"),
}


def _show_sites(console: Any, rows: dict[str, Any]) -> None:
    from rich.table import Table

    cells: dict[int, dict[str, str]] = {}
    for name, row in rows.items():
        for site in row["bottleneck"]["sites"]:
            text = f"{site['loss']:.3f} / {site['bound']:.3f}"
            cells.setdefault(site["block"], {})[name] = text
    if not cells:
        return
    table = Table("block", *rows, title="IB loss / bound by block, in nats")
    for block, by_name in sorted(cells.items()):
        table.add_row(str(block), *(by_name.get(name, "") for name in rows))
    console.print(table)
