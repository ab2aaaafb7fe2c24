"""The information bottleneck: both set-ups, by layer, and where one layer merges more or less."""

from __future__ import annotations

from collections.abc import Sequence

from reproduction.jobs import Classifier
from reproduction.scales.base import Network, Scale
from reproduction.tables.base import (
    GMACS,
    Better,
    Cell,
    Claim,
    Column,
    Picture,
    Row,
    Table,
    cell,
    claim,
    epoch_notes,
    experiment,
    gmacs,
    informations,
    number_of_epochs,
    row,
    top1,
)
from reproduction.tables.classification import tuned_jobs, untrained_jobs
from reproduction.tables.shared_jobs import (
    base_from_scratch,
    bottleneck,
    label,
    method_row,
    scratch_jobs,
    tuned,
)

_INFORMATION = {"IB bound": "ib_bound", "IB loss": "ib_loss"}


def _cells(jobs: Sequence[Classifier], suffix: str = "") -> dict[str, Cell]:
    measured = [bottleneck(job) for job in jobs]
    found = {f"top-1{suffix}": cell("top1", jobs)}
    return found | {f"{n}{suffix}": cell(m, measured) for n, m in _INFORMATION.items()}


def _claims(rows: list[Row], network: Network, column: str, other_column: str) -> list[Claim]:
    ours = label("ltm", network)
    return [
        claim(rows, ours, label(method, network), column, "lower", other_column=used)
        for method, used in (("none", other_column), ("tome", other_column), ("ltmp", column))
    ]


@experiment("ib-finetune", item="Table 6", title="IB loss and bound, fine-tuned")
def _finetuned(scale: Scale) -> Table:
    """Bottleneck of base, ToMe, LTMP and LTM, fine-tuned."""
    epochs = scale.bottleneck_epochs
    rows: list[Row] = []
    claims: list[Claim] = []
    for network in scale.bottleneck:
        for method in ("none", "tome"):
            jobs = untrained_jobs(network, method, scale)
            cells = gmacs(jobs) | _cells(jobs, " @0")
            rows.append(method_row("ib-finetune", method, network, cells))
        for method in ("ltmp", "ltm"):
            cells = gmacs(tuned_jobs(network, method, epochs[-1], scale))
            for number in epochs:
                cells |= _cells(tuned_jobs(network, method, number, scale), f" @{number}")
            rows.append(method_row("ib-finetune", method, network, cells))
        for kind in _INFORMATION:
            claims += _claims(rows, network, f"{kind} @{epochs[-1]}", f"{kind} @0")
    after = [0, *epochs]
    columns = [GMACS, *(top1(f"top-1 @{number}") for number in after)]
    columns += [informations(f"{kind} @{number}") for kind in _INFORMATION for number in after]
    picture = Picture(kind="points", column=f"IB loss @{epochs[-1]}", name="ib-loss")
    return Table(
        columns=tuple(columns), rows=tuple(rows), claims=tuple(claims), pictures=(picture,),
        notes=(_PLACE, _UNITS, *epoch_notes(scale.bottleneck[0])),
    )  # fmt: skip


_UNITS = (
    "Nats, on held-out images; the paper's scale of the bottleneck is not stated, so only "
    "directions can be compared."
)
_LAYERS_OF = "MobileViT-S"
"""The network whose layers the paper's table goes through."""
_PLACE = "The bottleneck is that of the last block."


@experiment("ib-scratch", item="Table 7", title="IB loss and bound, from scratch")
def scratch(scale: Scale) -> Table:
    """Bottleneck of base, ToMe, LTMP and LTM; LTM trained from scratch."""
    rows: list[Row] = []
    claims: list[Claim] = []
    last = scale.bottleneck_epochs[-1]
    for network in scale.bottleneck:
        jobs = {method: untrained_jobs(network, method, scale) for method in ("none", "tome")}
        jobs["ltmp"] = tuned_jobs(network, "ltmp", last, scale)
        jobs["ltm"] = scratch_jobs(network, scale)
        for method, found in jobs.items():
            cells = gmacs(found) | _cells(found)
            rows.append(method_row("ib-scratch", method, network, cells))
        for kind in _INFORMATION:
            claims += _claims(rows, network, kind, kind)
    columns = (GMACS, top1(), *(informations(kind) for kind in _INFORMATION))
    picture = Picture(kind="points", column="IB loss", name="ib-loss")
    return Table(
        columns=columns,
        rows=tuple(rows),
        claims=tuple(claims),
        pictures=(picture,),
        notes=(_PLACE, _UNITS, *_scratch_notes(scale)),
    )


def _scratch_notes(scale: Scale) -> list[str]:
    """Who does not begin from nothing, and how long LTMP is fine-tuned."""
    first, last = scale.finetune_epochs[0], scale.bottleneck_epochs[-1]
    notes = [
        f"{network.label} does not begin from nothing: it starts from published weights, and LTM "
        "trains all of them."
        for network in scale.bottleneck
        if network.scratch.model.pretrained or network.scratch.model.weights
    ]
    if first != last:
        epochs = number_of_epochs(last)
        notes.append(f"LTMP is fine-tuned for {epochs}; in Table 2 for {number_of_epochs(first)}.")
    return notes


@experiment("ib-layers", item="Figure 2", title="IB loss and bound after every layer")
def by_layer(scale: Scale) -> Table:
    """Bottleneck after every layer, a third of the way into training and at its end."""
    network, num_layers = scale.by_layer.network, scale.by_layer.num_layers
    end = network.scratch.optim.epochs
    third = max(1, end // 3)
    rows = []
    series = {
        f"{name}, epoch {epoch}": [bottleneck(job, epoch) for job in jobs]
        for name, jobs in (
            (label("none", network), [base_from_scratch(network, s) for s in scale.seeds]),
            (label("ltm", network), scratch_jobs(network, scale)),
        )
        for epoch in dict.fromkeys((third, end))
    }
    for name, jobs in series.items():
        cells = {
            f"{kind} {layer + 1}": cell(measure, jobs, layer)
            for kind, measure in _INFORMATION.items()
            for layer in range(num_layers)
        }
        rows.append(Row(label=name, cells=cells))
    columns = tuple(
        informations(f"{kind} {layer + 1}") for kind in _INFORMATION for layer in range(num_layers)
    )
    names = [f"{label(method, network)}, epoch {end}" for method in ("ltm", "none")]
    claims = [
        claim(rows, names[0], names[1], f"{kind} {num_layers}", "lower") for kind in _INFORMATION
    ] + [
        claim(rows, name, name, f"{kind} {num_layers}", "lower", other_column=f"{kind} 1")
        for name in names
        for kind in _INFORMATION
    ]
    pictures = tuple(
        Picture(kind="lines", column=kind, name=kind.lower().replace(" ", "-"))
        for kind in _INFORMATION
    )
    return Table(columns=columns, rows=tuple(rows), claims=tuple(claims), pictures=pictures,
                 notes=(_UNITS,))  # fmt: skip


@experiment("losses", item="Figure 3", title="Training and test loss by epoch")
def losses(scale: Scale) -> Table:
    """Training and test loss, base and LTM, from scratch."""
    columns = (
        Column(name="training loss", digits=4, better="lower"),
        Column(name="test loss", digits=4, better="lower"),
    )
    rows: list[Row] = []
    claims: list[Claim] = []
    for network in scale.losses:
        found = {
            "none": [base_from_scratch(network, seed) for seed in scale.seeds],
            "ltm": scratch_jobs(network, scale),
        }
        for method, jobs in found.items():
            cells = {
                "training loss": cell("train_loss", jobs),
                "test loss": cell("loss", jobs),
            }
            rows.append(Row(label=label(method, network), cells=cells))
        claims += [
            claim(rows, label("ltm", network), label("none", network), column.name, "lower")
            for column in columns
        ]
    return Table(
        columns=columns,
        rows=tuple(rows),
        claims=tuple(claims),
        pictures=(
            Picture(kind="history", column="train_loss", name="training-loss"),
            Picture(kind="history", column="val_loss", name="test-loss"),
        ),
        notes=("Losses at the end of training; the plots show every epoch.",),
    )


@experiment(
    "layers", item="Table 8", title="One layer at another compression ratio: top-1 and IB loss"
)
def layers(scale: Scale) -> Table:
    """One layer at another ratio than the rest."""
    network, epochs = scale.layers.network, scale.layer_epochs
    is_papers = network.stands_for == _LAYERS_OF
    rows, columns = [], []
    for ratio in scale.layer_ratios:
        columns += [top1(f"top-1 r={ratio:g}"), informations(f"IB loss r={ratio:g}")]
    for layer in range(scale.layers.num_layers):
        cells: dict[str, Cell] = {}
        for ratio in scale.layer_ratios:
            changed = None if ratio == scale.layer_share else (layer, ratio)
            jobs = [
                tuned(network, "ltm", None, epochs, seed, layer=changed,
                      merge={"per_block": scale.layer_share})
                for seed in scale.seeds
            ]  # fmt: skip
            cells[f"top-1 r={ratio:g}"] = cell("top1", jobs)
            cells[f"IB loss r={ratio:g}"] = cell(
                "ib_loss", [bottleneck(job) for job in jobs], layer
            )
        name = f"layer {layer + 1}"
        printed = name if is_papers else ""
        rows.append(row("layers", name, printed, cells))
    return Table(
        columns=tuple(columns),
        rows=tuple(rows),
        claims=tuple(_layer_claims(rows, scale)),
        pictures=(
            Picture(kind="rows", column="top-1", name="top1"),
            Picture(kind="rows", column="IB loss", name="ib-loss"),
        ),
        notes=(
            (
                f"{network.label}, fine-tuned for {number_of_epochs(epochs)}; every layer keeps "
                f"{scale.layer_share:g} of its tokens (the letter's ratio, which compounds), one "
                "of them another share."
            ),
            *epoch_notes(network),
            *([] if is_papers else [f"The paper's layers are those of {_LAYERS_OF}."]),
            _UNITS,
        ),
    )


def _layer_claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """In the bottom layers, fewer tokens cost accuracy and raise the loss."""
    found: list[Claim] = []
    kinds: tuple[tuple[str, Better], ...] = (("top-1", "lower"), ("IB loss", "higher"))
    usual, least = f"r={scale.layer_share:g}", f"r={min(scale.layer_ratios):g}"
    for made in rows[:5]:
        for kind, expected in kinds:
            first, other = f"{kind} {least}", f"{kind} {usual}"
            if first in made.cells and other in made.cells:
                found.append(
                    claim(rows, made.label, made.label, first, expected, other_column=other)
                )
    return found
