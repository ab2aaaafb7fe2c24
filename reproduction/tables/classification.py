"""Accuracy: fine-tuned, from scratch, by compression ratio."""

from __future__ import annotations

from dataclasses import replace

from reproduction.jobs import Classifier, Pruned, Race
from reproduction.scales.base import Network, Scale
from reproduction.tables.base import (
    GMACS,
    PARAMETERS,
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
    number_of_epochs,
    row,
    sizes,
    top1,
)
from reproduction.tables.shared_jobs import (
    ENTRANTS,
    OURS,
    base,
    converted,
    from_scratch,
    label,
    method_row,
    paper_label,
    ratio_of,
    scratch_jobs,
    seeds_of,
    tuned,
    with_seed,
)

UNTRAINED = ("none", "tome", "tofu")
SAME_SITES = ("tome-same", "tofu-same")
LEARNED = ("ltmp", *OURS)
_PRUNERS = {"s2vite": "S2ViTE", "spvit": "SPViT", "savit": "SAViT"}


def untrained_jobs(network: Network, method: str, scale: Scale) -> list[Classifier]:
    """The untouched network, or one that merges without training, of all seeds."""
    seeds = seeds_of(network, scale)
    return [converted(network, method, ratio_of(network, method, scale), seed) for seed in seeds]


def tuned_jobs(network: Network, method: str, epochs: int, scale: Scale) -> list[Classifier]:
    """A fine-tuned network, of all seeds."""
    ratio = ratio_of(network, method, scale)
    return [tuned(network, method, ratio, epochs, seed) for seed in scale.seeds]


@experiment(
    "finetune",
    item="Table 1",
    title="Weights frozen, mask modules trained: cost, time and top-1 by epochs",
)
def finetune(scale: Scale) -> Table:
    """The paper's comparison with weights frozen: only mask modules train."""
    epochs = scale.finetune_epochs
    columns = (
        PARAMETERS,
        GMACS,
        Column(name="min/epoch"),
        Column(name="ms/batch"),
        top1("top-1 @0"),
        *(top1(f"top-1 @{number}") for number in epochs),
    )
    rows: list[Row] = []
    claims: list[Claim] = []

    for network in scale.finetune:
        rows += _finetune_rows(network, scale)
        claims += _finetune_claims(rows, network, epochs)
    shares = "; ".join(_shares(network, scale) for network in scale.finetune)
    notes = (
        f"Shares of the MACs that are asked for, LTM and its peers: {shares}.",
        *epoch_notes(*scale.finetune),
        "Accuracy is that of the last epoch; no epoch is chosen on the images reported on.",
    )
    return Table(
        columns=columns,
        rows=tuple(rows),
        claims=tuple(claims),
        pictures=(Picture(kind="points", column=f"top-1 @{epochs[-1]}", name="top1"),),
        notes=notes,
    )


def _shares(network: Network, scale: Scale) -> str:
    """What LTM keeps, then what its peers keep, by name where they differ."""
    theirs: dict[float, list[str]] = {}
    for method in ("tome", "tofu", "ltmp"):
        theirs.setdefault(ratio_of(network, method, scale), []).append(ENTRANTS[method].title)
    peers = [
        f"{share:g}" if len(theirs) == 1 else f"{share:g} ({', '.join(names)})"
        for share, names in theirs.items()
    ]
    return f"{network.label} {ratio_of(network, 'matched', scale):g} and {', '.join(peers)}"


def _all_trained(name: str) -> str:
    return f"{name}, all trained"


def all_trained_jobs(network: Network, method: str, scale: Scale) -> list[Classifier]:
    """All weights trained on as long as mask modules are; the untouched network too."""
    ratio = None if method == "none" else ratio_of(network, method, scale)
    epochs = scale.finetune_epochs[-1]
    return [
        tuned(network, method, ratio, epochs, seed, tune={"trainable": "all"}, optim={"lr": 1e-4})
        for seed in scale.seeds
    ]


def _finetune_rows(network: Network, scale: Scale) -> list[Row]:
    epochs, race = scale.finetune_epochs, _table_race(network, scale)
    rows = []
    for method in (*UNTRAINED, *SAME_SITES):
        jobs = untrained_jobs(network, method, scale)
        cells = sizes(jobs) | {"top-1 @0": cell("top1", jobs)}
        if method in UNTRAINED:
            cells |= _milliseconds(method, race)
        rows.append(method_row("finetune", method, network, cells))
    for method in LEARNED:
        jobs = tuned_jobs(network, method, epochs[-1], scale)
        cells = sizes(jobs, macs_vary=method == "ltmp") | _milliseconds(method, race)
        cells["min/epoch"] = cell("minutes", jobs)
        if method in OURS:
            cells["top-1 @0"] = cell("top1", untrained_jobs(network, method, scale))
        for number in epochs:
            cells[f"top-1 @{number}"] = cell("top1", tuned_jobs(network, method, number, scale))
        rows.append(method_row("finetune", method, network, cells))
    for method in ("none", *OURS):
        jobs = all_trained_jobs(network, method, scale)
        cells = sizes(jobs) | {"min/epoch": cell("minutes", jobs)}
        cells[f"top-1 @{epochs[-1]}"] = cell("top1", jobs)
        rows.append(Row(label=_all_trained(label(method, network)), cells=cells))
    return rows


def _milliseconds(method: str, race: Race) -> dict[str, Cell]:
    return {"ms/batch": cell("milliseconds", [race], method)}


def _table_race(network: Network, scale: Scale) -> Race:
    """The race behind the milliseconds of a table: first seed, last epoch, eager."""
    untrained = {m: untrained_jobs(network, m, scale)[0] for m in UNTRAINED}
    learned = {m: tuned_jobs(network, m, scale.finetune_epochs[-1], scale)[0] for m in LEARNED}
    return Race(
        entrants=tuple((untrained | learned).items()),
        batch_size=scale.table_batch,
        dtype=scale.race_dtype,
        rounds=scale.race_rounds,
    )


def _finetune_claims(rows: list[Row], network: Network, epochs: tuple[int, ...]) -> list[Claim]:
    last, found = f"top-1 @{epochs[-1]}", []
    for method in OURS:
        ours = label(method, network)
        found += [
            claim(rows, ours, label(other, network), last, "higher", other_column="top-1 @0")
            for other in (*UNTRAINED, *SAME_SITES)
        ]
        found += [
            claim(rows, ours, label("ltmp", network), f"top-1 @{number}", "higher")
            for number in epochs
        ]
        original = _all_trained(label("none", network))
        found.append(claim(rows, _all_trained(ours), original, last, "higher"))
        found.append(claim(rows, ours, label("none", network), "ms/batch", "lower"))
    return found


@experiment("scratch", item="Table 2", title="Trained from scratch: cost and top-1")
def scratch(scale: Scale) -> Table:
    """The paper's comparison with everything trained from the beginning."""
    rows: list[Row] = []
    claims: list[Claim] = []
    for network in scale.scratch:
        forms = (*OURS, "letter") if network.label == scale.letter else OURS
        methods = [*UNTRAINED, "ltmp", *forms]
        jobs = {method: _scratch_jobs(network, method, scale) for method in methods}
        if network.label == scale.pruning:
            jobs |= {peer: _pruned_jobs(network, peer, scale) for peer in _PRUNERS}
        others: list[str] = []
        for method, found in jobs.items():
            name = _PRUNERS.get(method)
            names = [f"{name}-{n}" for n in (network.label, network.stands_for)] if name else [
                label(method, network), paper_label(method, network),
            ]  # fmt: skip
            cells = sizes(found, macs_vary=method == "ltmp") | {"top-1": cell("top1", found)}
            rows.append(row("scratch", names[0], names[1], cells))
            if method not in forms:
                others.append(names[0])
        claims += [
            claim(rows, label(form, network), other, "top-1", "higher")
            for form in forms
            for other in others
        ]
    return Table(
        columns=(PARAMETERS, GMACS, top1()),
        rows=tuple(rows),
        claims=tuple(claims),
        pictures=(Picture(kind="points", column="top-1", name="top1"),),
        notes=(
            (
                "As in the paper, ToMe and ToFu merge in the untouched network without training, "
                "and LTMP is fine-tuned for the fewest epochs of the table before."
            ),
            "S2ViTE, SPViT and SAViT are our readings of their papers (docs/experiments.md).",
        ),
    )


def _scratch_jobs(network: Network, method: str, scale: Scale) -> list[Classifier]:
    if ENTRANTS[method].method in ("none", "ltm"):
        return scratch_jobs(network, method, scale)
    if method == "ltmp":
        return tuned_jobs(network, method, scale.finetune_epochs[0], scale)
    return untrained_jobs(network, method, scale)


def _pruned_jobs(network: Network, peer: str, scale: Scale) -> list[Pruned]:
    kind: dict[str, object] = {"peer": peer}
    settings = replace(
        network.scratch,
        merge=replace(network.tune.merge, method="none", ratio=None),
        model=replace(network.scratch.model, pretrained=False, weights=None),
        optim=replace(network.scratch.optim, epochs=max(1, network.scratch.optim.epochs // 3)),
    )
    return [
        Pruned(
            settings=with_seed(settings, seed),
            start=base(network, seed),
            share=0.9,
            steps=scale.pruning_steps,
            **kind,  # pyright: ignore[reportArgumentType]
        )
        for seed in scale.seeds
    ]


@experiment("sweep", item="Table 5", title="Top-1 by compression ratio")
def sweep(scale: Scale) -> Table:
    """Accuracy by compression ratio, fine-tuned and from scratch."""
    network, other = scale.sweep, scale.sweep_scratch
    untouched = untrained_jobs(network, "none", scale)
    cells = gmacs(untouched) | {"fine-tuned": cell("top1", untouched)}
    if other is not None:
        jobs = [base(other, seed) for seed in scale.seeds]
        cells["from scratch"] = cell("top1", jobs)
    rows = [row("sweep", network.label, "ViT-B", cells)]
    epochs = scale.sweep_epochs
    for method in OURS:
        for ratio in scale.ratios:
            jobs = [tuned(network, method, ratio, epochs, seed) for seed in scale.seeds]
            cells = gmacs(jobs) | {"fine-tuned": cell("top1", jobs)}
            if other is not None and ratio in scale.scratch_ratios:
                trained = [from_scratch(other, method, ratio, seed) for seed in scale.seeds]
                cells["from scratch"] = cell("top1", trained)
            name = f"{ENTRANTS[method].title} r={ratio:.2f}"
            made = row("sweep", name, f"LTM r={ratio:.2f}", cells)
            rows.append(replace(made, group=ENTRANTS[method].title))
    claims = [
        claim(rows, made.label, network.label, column, "higher")
        for made in rows[1:]
        for column in ("fine-tuned", "from scratch")
        if column in made.cells and made.paper.get(column, 0) > rows[0].paper.get(column, 0)
    ]
    return Table(
        columns=(GMACS, top1("from scratch"), top1("fine-tuned")),
        rows=tuple(rows),
        claims=tuple(claims),
        pictures=(Picture(kind="cost", column="fine-tuned", name="sweep"),),
        notes=(*_sweep_notes(network, other, epochs), *epoch_notes(network)),
    )


def _sweep_notes(network: Network, other: Network | None, epochs: int) -> list[str]:
    """Which networks and epochs the two columns are about."""
    what = f"Fine-tuned is {network.label} after {number_of_epochs(epochs)}"
    if other is None or other.label == network.label:
        return [f"{what}."]
    return [f"{what}, from scratch {other.label}; GMACs are {network.label}'s."]
