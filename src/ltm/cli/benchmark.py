"""`ltm benchmark`: what merging gains in time, against the untouched network, on this machine."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ltm.cli.candidates import PUBLISHED_TOME, Images, Paddock, check_methods
from ltm.cli.races import Grid, Results
from ltm.files import check_folder
from ltm.models import (
    ModelSource,
    SizeError,
    check_name,
    refuse_given,
    require_least,
    split_methods,
)

if TYPE_CHECKING:
    import torch


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
    seed: int = 0,
    minutes: float | None = None,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Time networks, merged and untouched, in interleaved rounds on this machine.

    For every model, batch size, precision and scope all methods and modes take turns, in another
    order each round; a speed-up is the median of the rounds' ratios, with its 95% interval, against
    the untouched network with fused attention in the same mode and in its own best mode. "no gain
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
        seed: of untrained networks.
        minutes: start no further race after this many.
        output: folder for metrics.json and table.md.
        resume: add to the results there, leaving out what they hold already, however many rounds.
        overwrite: replace the results there.
    """
    import torch

    from ltm.evaluation.latency import DTYPES
    from ltm.evaluation.modes import MODES
    from ltm.processes import local_device

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
    settings: dict[str, object] = {"modes": wanted_modes, "ratio": ratio, "seed": seed}
    # Others may have begun at the same time: what they add stays.
    results = Results(output, where, keep=not overwrite, settings=settings)
    began = time.monotonic()
    images = None if data is None else Images(data, split, workers)
    try:
        for name in names:
            torch.manual_seed(seed)
            try:
                base = ModelSource(
                    model=None if run is not None else name,
                    pretrained=pretrained,
                    weights=weights,
                    run=run,
                    image_size=image_size,
                    model_args=model_args,
                ).load(untrained=True)
            except SizeError as error:
                if image_size is None or len(names) == 1:
                    raise
                refused = grid.conditions(name, (image_size, image_size), str(where))
                results.refuse(refused, wanted_modes, str(error))
                continue
            with results.lock.preparing():
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


def _listed(name: str, texts: Iterable[str], known: Iterable[str]) -> list[str]:
    found = _some(name, texts)
    for text in found:
        if text not in known:
            raise ValueError(f"{name}: {text} is not known; choose from {', '.join(known)}")
    return found


def _some(name: str, texts: Iterable[str]) -> list[str]:
    found = [part.strip() for part in ",".join(texts).split(",") if part.strip()]
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
    from ltm.methods import BASELINE, DEFAULT

    ratio_ = 0.7 if ratio is None else ratio
    if run is not None:
        refuse_given({"models": models, "methods": methods, "ratio": ratio}, "a saved run")
        return [str(run)], [], ratio_
    found = split_methods((BASELINE, DEFAULT) if methods is None else methods, PUBLISHED_TOME)
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
