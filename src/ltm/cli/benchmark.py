"""`ltm benchmark`: what merging gains in time, against the untouched network, on this machine."""

from functools import partial
from pathlib import Path

from ltm.cli.commands import Flat, say
from ltm.evaluation.settings import BenchmarkSettings
from ltm.models import ModelSource, refuse_given


def benchmark(
    settings: Flat[BenchmarkSettings],
    *,
    models: tuple[str, ...] | None = None,
    methods: tuple[str, ...] | None = None,
    pretrained: bool = False,
    weights: Path | None = None,
    run: Path | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Time networks, merged and untouched, in interleaved rounds on this machine.

    For every model, batch size, precision and scope all methods and modes take turns, in another
    order each round; a speed-up is the median of the rounds' ratios, with its 95% interval, against
    the untouched network with fused attention in the same mode and in its own best mode. "no gain
    here" means that the interval touches 1. Rows are written as they come: with --resume a long
    grid can be gathered over several runs, each with its own base. Runs with --resume may share an
    output at the same time: they get ready (compile) side by side, are timed one after the other,
    and measure nothing twice.

    Example:
        ltm benchmark --models vit_base_patch16_224 --methods tome,ltm,ltm-static
            --batch-sizes 1,128 --modes eager,cudagraph --dtypes fp16 --output runs/speed

    Args:
        settings: what is timed, and how.
        models: timm's names, vit_small_patch16_224 unless given.
        methods: tome and ltm unless given; such as tofu, ltmp, ltm-static, ltm-uniform (matching
            alone), tome-reference (the published code's algorithm), or with settings,
            ltm:ratio=0.5,sites=3+5+8.
        pretrained: take timm's own weights; without any the network is untrained.
        weights: take those of a file in timm's keys, .safetensors or .pth.
        run: time a saved network, against itself without merging, instead of models and methods.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        output: folder for metrics.json and table.md.
        resume: add to the results there, leaving out what they hold already, however many rounds.
        overwrite: replace the results there.
    """
    network = partial(
        ModelSource,
        pretrained=pretrained,
        weights=weights,
        image_size=image_size,
        model_args=model_args,
    )
    if run is not None:
        refuse_given({"models": models}, "a saved run")
        sources = [network(run=run)]
    else:
        names = ",".join(("vit_small_patch16_224",) if models is None else models).split(",")
        sources = [network(model=name.strip()) for name in names if name.strip()]
    options = {"folder": output, "resume": resume, "overwrite": overwrite}

    from ltm.evaluation import benchmark as benchmarking

    result = benchmarking.benchmark(sources, methods, settings, say=say, **options)
    if result.complete_failure:
        raise SystemExit(1)
