"""What the supplement and the last figure are about: weights, LoRA, transfer, throughput."""

from __future__ import annotations

from reproduction.jobs import Classifier, Heatmap, Race
from reproduction.scales.base import Scale
from reproduction.tables.base import (
    GMACS,
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
    top1,
)
from reproduction.tables.classification import (
    UNTRAINED,
    all_trained_jobs,
    tuned_jobs,
    untrained_jobs,
)
from reproduction.tables.shared_jobs import (
    ENTRANTS,
    OURS,
    base,
    label,
    ratio_of,
    started,
    tuned,
    with_method,
    with_seed,
)

STATIC = {"method_options": ("support=learned", "weights=uniform")}
"""The learned mask with uniform weights: the same for every image."""


@experiment("heatmaps", item="Figure 4", title="Merge weights over images")
def heatmaps(scale: Scale) -> Table:
    """Merge weights of the first merging block: LTM beside LTMP as the paper describes it."""
    network, epochs = scale.heatmap, scale.finetune_epochs[-1]
    options = {"LTMP": STATIC, ENTRANTS["learned"].title: {}}
    ratio = ratio_of(network, "learned", scale)
    entrants = tuple(
        (name, tuned(network, "learned", ratio, epochs, scale.seeds[0], merge=merge))
        for name, merge in options.items()
    )
    job = Heatmap(entrants=entrants)
    columns = (Column(name="patches", digits=1), Column(name="evenness", digits=4))
    rows = [
        Row(
            label=f"{name}-{network.label}",
            cells={c.name: cell(c.name, [job], name) for c in columns},
        )
        for name in options
    ]
    labels = [row.label for row in rows]
    return Table(
        columns=columns,
        rows=tuple(rows),
        claims=(claim(rows, labels[1], labels[0], "evenness", "lower"),),
        pictures=(Picture(kind="copy", name="weights"),),
        notes=(
            (
                "Patches of the target token, and how even their weights are (1: all the same). "
                "LTMP is drawn as the paper describes it: the learned mask with uniform weights."
            ),
        ),
    )


@experiment("transfer", item="Supplement 2.1", title="Transfer to other classes")
def transfer(scale: Scale) -> Table:
    """Networks trained on other classes than they were made for, with and without merging."""
    network, settings = scale.transfer, scale.transfer_tune
    rows: list[Row] = []
    for method in ("none", "tome", *OURS):
        ratio = None if method == "none" else ratio_of(network, method, scale)
        chosen = started(with_method(settings, method, ratio))
        jobs = [
            Classifier(settings=with_seed(chosen, seed), start=base(network, seed))
            for seed in scale.seeds
        ]
        cells = gmacs(jobs) | {"top-1": cell("top1", jobs)}
        rows.append(Row(label=label(method, network), cells=cells))
    claims = tuple(
        claim(rows, label(ours, network), label(other, network), "top-1", "higher")
        for ours in OURS
        for other in ("none", "tome")
    )
    return Table(
        columns=(GMACS, top1()),
        rows=tuple(rows),
        claims=claims,
        pictures=(Picture(kind="points", column="top-1", name="top1"),),
        notes=("All weights train on the new classes; merging is on from the first step.",),
    )


@experiment("lora", item="Supplement 2.2", title="Fine-tuning with LoRA")
def lora(scale: Scale) -> Table:
    """Mask modules alone, and with LoRA adapters beside them."""
    network, epochs = scale.lora, scale.finetune_epochs[-1]
    adapters = {
        "tune": {"lora_rank": 8},
        "optim": {"lr": 1e-3, "merger_lr": network.tune.optim.lr},
    }
    columns = (
        Column(name="trained (K)", digits=1),
        GMACS,
        Column(name="min/epoch"),
        top1(),
    )
    rows: list[Row] = []
    claims: list[Claim] = []
    for method in OURS:
        name, ratio = label(method, network), ratio_of(network, method, scale)
        variants = {
            name: tuned_jobs(network, method, epochs, scale),
            f"{name} + LoRA": [
                tuned(network, method, ratio, epochs, seed, **adapters) for seed in scale.seeds
            ],
            f"{name}, all trained": all_trained_jobs(network, method, scale),
        }
        rows += [_lora_row(row, jobs) for row, jobs in variants.items()]
        alone, lora, whole = variants
        claims += [
            claim(rows, lora, whole, "trained (K)", "lower"),
            claim(rows, lora, whole, "min/epoch", "lower"),
            claim(rows, lora, alone, "top-1", "higher"),
        ]
    name = f"{network.label}, all trained"
    rows.append(_lora_row(name, all_trained_jobs(network, "none", scale)))
    return Table(
        columns=columns,
        rows=tuple(rows),
        claims=tuple(claims),
        pictures=(Picture(kind="points", column="top-1", name="top1"),),
        notes=(f"{epochs} epochs each, from the same network.", *epoch_notes(network)),
    )


def _lora_row(name: str, jobs: list[Classifier]) -> Row:
    cells = {
        "trained (K)": cell("trained", jobs[:1]),
        **gmacs(jobs),
        "min/epoch": cell("minutes", jobs),
        "top-1": cell("top1", jobs),
    }
    return Row(label=name, cells=cells)


@experiment("throughput", item="Supplement 2.3", title="Images per second by batch size")
def throughput(scale: Scale) -> Table:
    """Images per second by batch size; LTM in its forms, uniform weights among them."""
    columns = tuple(
        Column(name=f"batch {size}", digits=0, better="higher") for size in scale.batch_sizes
    )
    rows: list[Row] = []
    claims: list[Claim] = []
    for network in scale.races:
        entrants = {m: untrained_jobs(network, m, scale)[0] for m in UNTRAINED}
        epochs = scale.finetune_epochs[0]
        entrants |= {m: tuned_jobs(network, m, epochs, scale)[0] for m in OURS}
        ratio = ratio_of(network, "learned", scale)
        entrants["static"] = tuned(network, "learned", ratio, epochs, scale.seeds[0], merge=STATIC)
        races = {
            size: Race(
                entrants=tuple(entrants.items()),
                batch_size=size,
                mode=scale.race_mode,
                dtype=scale.race_dtype,
                rounds=scale.race_rounds,
            )
            for size in scale.batch_sizes
        }
        for method in entrants:
            name = (
                f"LTM (learned mask, uniform)-{network.label}"
                if method == "static"
                else label(method, network)
            )
            cells = {
                f"batch {size}": cell("throughput", [race], method) for size, race in races.items()
            }
            rows.append(Row(label=name, cells=cells, group=network.label))
        claims += [
            claim(rows, label(ours, network), label(method, network), column.name, "higher")
            for ours in OURS
            for method in UNTRAINED
            for column in columns
        ]
    return Table(
        columns=columns,
        rows=tuple(rows),
        claims=tuple(claims),
        pictures=(Picture(kind="lines", column="batch", name="throughput"),),
        notes=(
            (
                f"Images per second, {scale.race_dtype}, mode {scale.race_mode}, medians of "
                f"{scale.race_rounds} interleaved rounds."
            ),
        ),
    )
