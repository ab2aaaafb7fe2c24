"""`ltm benchmark`: what merging gains in time, against the untouched network, on this machine."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ltm.cli.entrants import Images, Paddock, check_methods
from ltm.cli.hosts import SizeError, check_name
from ltm.cli.images import require_least
from ltm.cli.models import RATIO, load_model, refuse_given, split_methods
from ltm.cli.results import check_folder

if TYPE_CHECKING:
    import torch

    from ltm.evaluation.latency import Conditions, Entrant, Timing


def benchmark(
    *,
    models: tuple[str, ...] | None = None,
    methods: tuple[str, ...] | None = None,
    ratio: float | None = None,
    batch_sizes: tuple[str, ...] = ("1", "8", "32"),
    modes: tuple[str, ...] = ("eager",),
    dtypes: tuple[str, ...] = ("fp32",),
    scopes: tuple[Literal["model", "end-to-end", "training"], ...] = ("model",),
    data: str | None = None,
    split: str = "val",
    pretrained: bool = False,
    weights: Path | None = None,
    run: Path | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    workers: int = 2,
    rounds: int = 15,
    warmup: int = 3,
    channels_last: bool = False,
    device: str = "auto",
    minutes: float | None = None,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Time networks, merged and untouched, in interleaved rounds on this machine.

    For every model, batch size, precision and scope all methods and modes take turns, a, b, c, a,
    b, c; a speed-up is the median of the rounds' ratios, with its 95% interval, against the
    untouched network with fused attention in the same mode and in its own best mode. "no gain
    here" means that the interval touches 1. Rows are written as they come: with --resume a long
    grid can be gathered over several runs, each with its own base. Runs that share an output at the
    same time get ready (compile) side by side, and are timed one after the other.

    Example:
        ltm benchmark --models vit_base_patch16_224 --methods tome,ltm,ltm-static
            --batch-sizes 1,128 --modes eager,cudagraph --dtypes fp16 --output runs/speed

    Args:
        models: timm's names, vit_small_patch16_224 unless given.
        methods: tome and ltm unless given; such as tofu, ltmp, ltm-static, ltm-uniform (matching
            alone), tome-reference (the published code's algorithm), or with settings,
            ltm:ratio=0.5,sites=3+5+8.
        ratio: share of the multiply-adds that may remain, 0.7 unless given.
        batch_sizes: images per batch.
        modes: eager, compiled, cudagraph, compiled-cudagraph, onnxruntime.
        dtypes: fp32, fp16, bf16.
        scopes: model (forward alone), end-to-end (with the loader; needs --data), training (step).
        data: images to run on, as for ltm evaluate; noise unless given.
        split: split of the data, where it has several.
        pretrained: take timm's own weights; without any the network is untrained.
        weights: take those of a file in timm's keys, .safetensors or .pth.
        run: time a saved network, against itself without merging, instead of models and methods.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        workers: loader processes, end to end.
        rounds: rounds of the interleaved loop.
        warmup: calls before the first round.
        channels_last: keep images in this layout, which suits convolutions.
        device: auto, cpu, cuda or cuda:N.
        minutes: start no further race after this many.
        output: folder for metrics.json and table.md.
        resume: add to the results there, leaving out what they hold already, however many rounds.
        overwrite: replace the results there.
    """
    from ltm.evaluation.latency import DTYPES
    from ltm.evaluation.processes import local_device
    from ltm.evaluation.runners import MODES

    _check_output(output, resume=resume, overwrite=overwrite)
    wanted_modes = _listed("modes", modes, MODES)
    grid = Grid(
        batch_sizes=[_positive("batch_sizes", text) for text in _some("batch_sizes", batch_sizes)],
        dtypes=_listed("dtypes", dtypes, DTYPES),
        scopes=_some("scopes", scopes),
        rounds=rounds,
        warmup=warmup,
        channels_last=channels_last,
    )
    require_least("rounds", rounds)
    require_least("warmup", warmup, 0)
    names, wanted, ratio = _asked_for(run, models, methods, ratio)
    _check_minutes(minutes)
    if "end-to-end" in scopes and data is None:
        raise ValueError("scope end-to-end needs images: give --data")
    where = local_device(device)
    _leave_room(where)
    settings: dict[str, object] = {"modes": wanted_modes, "ratio": ratio}
    # Others may have begun at the same time: what they add stays.
    results = Results(output, where, keep=not overwrite, settings=settings)
    began = time.monotonic()
    images = None if data is None else Images(data, split, workers)
    try:
        for name in names:
            try:
                base = load_model(
                    None if run is not None else name,
                    pretrained=pretrained,
                    weights=weights,
                    run=run,
                    image_size=image_size,
                    model_args=model_args,
                    untrained=True,
                )
            except SizeError as error:
                if image_size is None or len(names) == 1:
                    raise
                refused = grid.conditions(name, (image_size, image_size), str(where))
                results.refuse(refused, wanted_modes, str(error))
                continue
            with results.turns.preparing():
                paddock = Paddock(base, wanted, ratio, where, images)
            for conditions in grid.conditions(name, paddock.image_size, str(where)):
                if minutes is not None and time.monotonic() - began > 60 * minutes:
                    print(f"stopped after {minutes:g} minutes; --resume does the rest", flush=True)
                    return
                results.race(paddock, conditions, wanted_modes)
    except KeyboardInterrupt:
        print(f"interrupted; {results.where_they_are()}", flush=True)
        raise SystemExit(130) from None
    finally:
        results.close()
    results.require_one()


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Batch sizes x precisions x scopes."""

    batch_sizes: Sequence[int]
    dtypes: Sequence[str]
    scopes: Sequence[str]
    rounds: int
    warmup: int
    channels_last: bool

    def conditions(
        self, model: str, image_size: tuple[int, int], device: str
    ) -> "Iterator[Conditions]":
        from ltm.evaluation.latency import Conditions

        for scope, dtype, batch_size in product(self.scopes, self.dtypes, self.batch_sizes):
            yield Conditions(
                model=model,
                image_size=image_size,
                batch_size=batch_size,
                dtype=dtype,
                scope=scope,  # pyright: ignore[reportArgumentType]
                device=device,
                channels_last=self.channels_last,
                rounds=self.rounds,
                warmup=self.warmup,
            )


class Results:
    """Rows as they come: printed at once, written after every race."""

    def __init__(
        self, output: Path | None, device: Any, *, keep: bool, settings: dict[str, object]
    ) -> None:
        from ltm.evaluation.environment import describe
        from ltm.evaluation.tables import TimingFile
        from ltm.evaluation.turns import Turns

        path = None if output is None else output / "metrics.json"
        self.file = TimingFile(path, keep=keep)
        self.environment = describe(device)
        self.file.start_run(self.environment, settings)
        self.turns = Turns(None if path is None else path.with_suffix(".turns"))
        self.output = output
        self._ran: list[bool] = []
        packages = ", ".join(f"{n} {v}" for n, v in self.environment.packages.items())
        print(f"{self.environment.device}, {packages}", flush=True)

    def race(self, paddock: Paddock, conditions: "Conditions", modes: Sequence[str]) -> None:
        """Race whatever is not in the file yet, together with the base."""
        from ltm.evaluation.latency import BASE, did_not_run, race

        training = conditions.scope == "training"
        with self.turns.preparing():
            ready, rows = [paddock.entrant(BASE, training=training)], []
            for method in paddock.methods:
                try:
                    entrant = paddock.entrant(method, training=training)
                except ValueError as error:
                    ratio = paddock.ratio_of(method)
                    rows += did_not_run(method, ratio, conditions, modes, str(error))
                    continue
                if not self._held(entrant, conditions, modes):
                    ready.append(entrant)
            images = paddock.batch(conditions.batch_size) if len(ready) > 1 else None
        rows = [row for row in rows if not self.file.holds(row, self.environment.device)]
        self._announce(conditions)
        if images is not None:
            end_to_end = conditions.scope == "end-to-end"
            rows += race(
                ready,
                conditions,
                modes,
                images=images,
                loader=paddock.loader(conditions.batch_size) if end_to_end else None,
                turns=self.turns,
            )
        elif not rows:
            print("  measured before", flush=True)
        self._add(rows)

    def refuse(self, races: "Iterable[Conditions]", modes: Sequence[str], reason: str) -> None:
        """Say of a model that it cannot even run untouched, in a row of each of its races."""
        from ltm.evaluation.latency import BASE, did_not_run

        for conditions in races:
            self._announce(conditions)
            self._add(did_not_run(BASE, None, conditions, modes, reason))

    def _announce(self, conditions: "Conditions") -> None:
        title = f"{conditions.model}, batch {conditions.batch_size}, {conditions.dtype}"
        print(f"\n{title}, {conditions.scope}:", flush=True)

    def require_one(self) -> None:
        """Fail where there were rows, and all of them say why they did not run."""
        if self._ran and not any(self._ran):
            raise SystemExit(1)

    def _add(self, rows: "list[Timing]") -> None:
        self._ran += [row.milliseconds is not None for row in rows]
        self.file.add(rows)
        for row in rows:
            print(f"  {_line(row)}", flush=True)

    def _held(self, entrant: "Entrant", conditions: "Conditions", modes: Sequence[str]) -> bool:
        from ltm.evaluation.latency import did_not_run

        rows = did_not_run(entrant.method, entrant.ratio, conditions, modes, "")
        return all(self.file.holds(row, self.environment.device) for row in rows)

    def close(self) -> None:
        """Write the table, and say where it is."""
        self.file.write_table()
        if self.output is not None and self.file.rows:
            print(f"\n{self.where_they_are()}", flush=True)

    def where_they_are(self) -> str:
        if self.output is None:
            return "nothing was written: give --output"
        return f"{len(self.file.rows)} rows are in {self.output}/metrics.json and table.md"


def _line(row: "Timing") -> str:
    name = row.method if row.ratio is None else f"{row.method} {row.ratio:g}"
    start = f"{name:<24} {row.mode:<18}"
    if row.milliseconds is None or row.quartiles is None:
        return f"{start} did not run: {row.error}"
    low, high = row.quartiles
    text = f"{start} {row.milliseconds:9.3f} ms ({low:.3f}-{high:.3f}) "
    text += f"{row.images_per_second:9.1f} images/s  {row.verdict}"
    if row.best_speedup is not None:
        text += f" ({row.best_speedup:.2f}x against base's best mode)"
    return text


def _listed(name: str, texts: Iterable[str], known: Iterable[str]) -> list[str]:
    found = _some(name, texts)
    for text in found:
        if text not in known:
            raise ValueError(f"{name}: {text} is not known; choose from {', '.join(known)}")
    return found


def _some(name: str, texts: Iterable[str]) -> list[str]:
    found = split_methods(texts)
    if not found:
        raise ValueError(f"{name}: there is none; give at least one")
    return found


def _check_output(output: Path | None, *, resume: bool, overwrite: bool) -> None:
    if resume and (overwrite or output is None):
        raise ValueError("--resume adds to the results in --output: give that, and no --overwrite")
    ways = "use --resume to add to them, or --overwrite"
    check_folder(output, overwrite=overwrite or resume, other_ways=ways)


def _asked_for(
    run: Path | None,
    models: tuple[str, ...] | None,
    methods: tuple[str, ...] | None,
    ratio: float | None,
) -> tuple[list[str], list[str], float]:
    """Networks, methods and the share that remains; a saved run has all of them."""
    ratio_ = RATIO if ratio is None else ratio
    if run is not None:
        refuse_given({"models": models, "methods": methods, "ratio": ratio}, "a saved run")
        return [str(run)], [], ratio_
    found = split_methods(("tome", "ltm") if methods is None else methods)
    check_methods(found, ratio_)
    names = _some("models", ("vit_small_patch16_224",) if models is None else models)
    for name in names:
        check_name(name)
    return names, found, ratio_


def _leave_room(device: "torch.device") -> None:
    """A GPU keeps few threads of the processor busy; more would be in the way of runs beside it."""
    from torch import get_num_threads, set_num_threads

    if device.type == "cuda":
        set_num_threads(min(get_num_threads(), 2))


def _check_minutes(minutes: float | None) -> None:
    if minutes is not None and not minutes >= 0:
        raise ValueError(f"--minutes is {minutes:g}: it must be at least 0")


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}: {text} is no number of images; give whole numbers from 1")
    return int(text)
