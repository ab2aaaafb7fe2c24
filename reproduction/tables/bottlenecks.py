"""The information bottleneck: both set-ups, by layer, and where one layer merges more or less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    ENTRANTS,
    OURS,
    bottleneck,
    label,
    method_row,
    scratch_jobs,
    started,
    tuned,
)

_INFORMATION = {"IB bound": "ib_bound", "IB loss": "ib_loss"}


def _cells(jobs: Sequence[Classifier], suffix: str = "") -> dict[str, Cell]:
    measured = [bottleneck(job) for job in jobs]
    found = {f"top-1{suffix}": cell("top1", jobs)}
    return found | {f"{n}{suffix}": cell(m, measured) for n, m in _INFORMATION.items()}


def _claims(rows: list[Row], network: Network, column: str, other_column: str) -> list[Claim]:
    others = (("none", other_column), ("tome", other_column), ("tome-same", other_column))
    return [
        claim(rows, label(ours, network), label(method, network), column, "lower",
              other_column=used)
        for ours in OURS
        for method, used in (*others, ("ltmp", column))
    ]  # fmt: skip


@experiment("ib-finetune", item="Table 6", title="IB loss and bound, fine-tuned")
def _finetuned(scale: Scale) -> Table:
    """Bottleneck of base, ToMe, LTMP and LTM, fine-tuned."""
    epochs = scale.bottleneck_epochs
    rows: list[Row] = []
    claims: list[Claim] = []
    for network in scale.bottleneck:
        for method in ("none", "tome", "tome-same"):
            jobs = untrained_jobs(network, method, scale)
            cells = gmacs(jobs) | _cells(jobs, " @0")
            rows.append(method_row("ib-finetune", method, network, cells))
        for method in ("ltmp", *OURS):
            cells = gmacs(tuned_jobs(network, method, epochs[-1], scale))
            if method in OURS:
                cells |= _cells(untrained_jobs(network, method, scale), " @0")
            for number in epochs:
                cells |= _cells(tuned_jobs(network, method, number, scale), f" @{number}")
            rows.append(method_row("ib-finetune", method, network, cells))
        for kind in _INFORMATION:
            claims += _claims(rows, network, f"{kind} @{epochs[-1]}", f"{kind} @0")
        claims += [
            claim(rows, label(ours, network), label("none", network), f"top-1 @{epochs[-1]}",
                  "higher", other_column="top-1 @0")
            for ours in OURS
        ]  # fmt: skip
    after = [0, *epochs]
    columns = [GMACS, *(top1(f"top-1 @{number}") for number in after)]
    columns += [informations(f"{kind} @{number}") for kind in _INFORMATION for number in after]
    picture = Picture(kind="points", column=f"IB loss @{epochs[-1]}", name="ib-loss")
    return Table(
        columns=tuple(columns), rows=tuple(rows), claims=tuple(claims), pictures=(picture,),
        notes=(_PLACE, _UNITS, *epoch_notes(*scale.bottleneck)),
    )  # fmt: skip


_UNITS = (
    "Nats, on held-out images; the paper's scale of the bottleneck is not stated, so only "
    "directions can be compared."
)
_LAYERS_OF = "MobileViT-S"
"""The network whose layers the paper's table goes through."""
_PLACE = (
    "The bottleneck is that of the last block. ToMe and LTMP merge in every block, LTM in three of "
    "a ViT; ToMe (LTM's sites) merges in the same blocks as LTM (matched) and keeps as many tokens."
)


@experiment("ib-scratch", item="Table 7", title="IB loss and bound, from scratch")
def scratch(scale: Scale) -> Table:
    """Bottleneck of base, ToMe, LTMP and LTM; LTM trained from scratch."""
    rows: list[Row] = []
    claims: list[Claim] = []
    last = scale.bottleneck_epochs[-1]
    for network in scale.bottleneck_scratch:
        jobs = {method: untrained_jobs(network, method, scale) for method in ("tome", "tome-same")}
        jobs["ltmp"] = tuned_jobs(network, "ltmp", last, scale)
        jobs |= {method: scratch_jobs(network, method, scale) for method in ("none", *OURS)}
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
    """How long LTMP is fine-tuned."""
    first, last = scale.finetune_epochs[0], scale.bottleneck_epochs[-1]
    if first == last:
        return []
    epochs = number_of_epochs(last)
    return [f"LTMP is fine-tuned for {epochs}; in Table 2 for {number_of_epochs(first)}."]


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
            (label(method, network), scratch_jobs(network, method, scale))
            for method in ("none", *OURS)
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
    names = [f"{label(method, network)}, epoch {end}" for method in (*OURS, "none")]
    claims = [
        claim(rows, name, names[-1], f"{kind} {num_layers}", "lower")
        for name in names[:-1]
        for kind in _INFORMATION
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
        for method in ("none", *OURS):
            jobs = scratch_jobs(network, method, scale)
            for _ in range(scale.loss_cycles - 1):
                jobs = [Classifier(settings=started(job.settings), start=job) for job in jobs]
            cells = {
                "training loss": cell("train_loss", jobs),
                "test loss": cell("loss", jobs),
            }
            rows.append(Row(label=label(method, network), cells=cells))
        claims += [
            claim(rows, label(method, network), label("none", network), column.name, "lower")
            for method in OURS
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
    for method in OURS:
        for layer in range(scale.layers.num_layers):
            name = f"layer {layer + 1}"
            made = row(
                "layers",
                f"{ENTRANTS[method].title}, {name}",
                name if is_papers else "",
                _layer_cells(scale, method, layer),
            )
            rows.append(replace(made, group=ENTRANTS[method].title))
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


def _layer_cells(scale: Scale, method: str, layer: int) -> dict[str, Cell]:
    """What one layer's ratios give: top-1, and the loss of that layer."""
    cells: dict[str, Cell] = {}
    for ratio in scale.layer_ratios:
        changed = None if ratio == scale.layer_share else (layer, ratio)
        jobs = [
            tuned(scale.layers.network, method, None, scale.layer_epochs, seed, layer=changed,
                  merge={"per_block": scale.layer_share})
            for seed in scale.layer_seeds or scale.seeds
        ]  # fmt: skip
        cells[f"top-1 r={ratio:g}"] = cell("top1", jobs)
        cells[f"IB loss r={ratio:g}"] = cell("ib_loss", [bottleneck(job) for job in jobs], layer)
    return cells


def _layer_claims(rows: list[Row], scale: Scale) -> list[Claim]:
    """From most tokens to the usual share the loss falls and top-1 rises; with fewer the reverse.

    The paper says the second of all layers, and that it shows most in the first five.
    """
    usual, most = scale.layer_share, max(scale.layer_ratios)
    rise: tuple[Better, Better] = ("higher", "lower")
    fall: tuple[Better, Better] = ("lower", "higher")
    steps = [(usual, most, rise)] if most > usual else []
    steps += [(ratio, usual, fall) for ratio in scale.layer_ratios if ratio < usual]
    found: list[Claim] = []
    for made in rows:
        for first, other, expected in steps:
            for kind, way in zip(("top-1", "IB loss"), expected, strict=True):
                names = (f"{kind} r={first:g}", f"{kind} r={other:g}")
                found.append(
                    claim(rows, made.label, made.label, names[0], way, other_column=names[1])
                )
    return found
