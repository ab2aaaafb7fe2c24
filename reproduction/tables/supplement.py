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
    tuned_jobs,
    untrained_jobs,
)
from reproduction.tables.shared_jobs import (
    base,
    label,
    ratio_of,
    started,
    tuned,
    with_method,
    with_seed,
)

STATIC = {"method_options": ("support=learned", "weights=uniform")}


@experiment("heatmaps", item="Figure 4", title="Merge weights over images")
def heatmaps(scale: Scale) -> Table:
    """Merge weights of the first merging block: LTM beside LTMP as the paper describes it."""
    network, epochs = scale.heatmap, scale.finetune_epochs[-1]
    options = {"LTMP": STATIC, "LTM": {"method_options": ("support=learned",)}}
    ratio = ratio_of(network, "ltm", scale)
    entrants = tuple(
        (name, tuned(network, "ltm", ratio, epochs, scale.seeds[0], merge=merge))
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
    for method in ("none", "tome", "ltm"):
        ratio = None if method == "none" else ratio_of(network, method, scale)
        chosen = started(with_method(settings, method, ratio))
        jobs = [
            Classifier(settings=with_seed(chosen, seed), start=base(network, seed))
            for seed in scale.seeds
        ]
        cells = gmacs(jobs) | {"top-1": cell("top1", jobs)}
        rows.append(Row(label=label(method, network), cells=cells))
    names = [label(method, network) for method in ("ltm", "none", "tome")]
    return Table(
        columns=(GMACS, top1()),
        rows=tuple(rows),
        claims=tuple(claim(rows, names[0], other, "top-1", "higher") for other in names[1:]),
        pictures=(Picture(kind="points", column="top-1", name="top1"),),
        notes=("All weights train on the new classes; merging is on from the first step.",),
    )


@experiment("lora", item="Supplement 2.2", title="Fine-tuning with LoRA")
def lora(scale: Scale) -> Table:
    """Mask modules alone, and with LoRA adapters beside them."""
    network, epochs = scale.lora, scale.finetune_epochs[-1]
    variants = {
        label("ltm", network): {},
        f"{label('ltm', network)} + LoRA": {
            "tune": {"lora_rank": 8},
            "optim": {"lr": 1e-3, "merger_lr": network.tune.optim.lr},
        },
        f"{label('ltm', network)}, all trained": {
            "tune": {"trainable": "all"},
            "optim": {"lr": min(network.scratch.optim.lr, 2e-4)},
        },
    }
    columns = (
        Column(name="trained (K)", digits=1),
        GMACS,
        Column(name="min/epoch"),
        top1(),
    )
    rows = []
    ratio = ratio_of(network, "ltm", scale)
    for name, changes in variants.items():
        jobs = [tuned(network, "ltm", ratio, epochs, seed, **dict(changes)) for seed in scale.seeds]
        cells = {
            "trained (K)": cell("trained", jobs[:1]),
            **gmacs(jobs),
            "min/epoch": cell("minutes", jobs),
            "top-1": cell("top1", jobs),
        }
        rows.append(Row(label=name, cells=cells))
    names = list(variants)
    claims = (
        claim(rows, names[1], names[2], "trained (K)", "lower"),
        claim(rows, names[1], names[2], "min/epoch", "lower"),
        claim(rows, names[1], names[0], "top-1", "higher"),
    )
    return Table(
        columns=columns,
        rows=tuple(rows),
        claims=claims,
        pictures=(Picture(kind="points", column="top-1", name="top1"),),
        notes=(f"{epochs} epochs each, from the same network.", *epoch_notes(network)),
    )


@experiment("throughput", item="Supplement 2.3", title="Images per second by batch size")
def throughput(scale: Scale) -> Table:
    """Images per second by batch size; LTM by matching and with its static mask."""
    columns = tuple(
        Column(name=f"batch {size}", digits=0, better="higher") for size in scale.batch_sizes
    )
    rows: list[Row] = []
    claims: list[Claim] = []
    for network in scale.races:
        entrants = {m: untrained_jobs(network, m, scale)[0] for m in UNTRAINED}
        entrants["ltm"] = tuned_jobs(network, "ltm", scale.finetune_epochs[0], scale)[0]
        ratio, epochs = ratio_of(network, "ltm", scale), scale.finetune_epochs[0]
        entrants["static"] = tuned(network, "ltm", ratio, epochs, scale.seeds[0], merge=STATIC)
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
                label("ltm", network) + " (static)"
                if method == "static"
                else label(method, network)
            )
            cells = {
                f"batch {size}": cell("throughput", [race], method) for size, race in races.items()
            }
            rows.append(Row(label=name, cells=cells, group=network.label))
        claims += [
            claim(rows, label("ltm", network), label(method, network), column.name, "higher")
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
