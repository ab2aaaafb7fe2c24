"""`ltm benchmark`: what merging gains in time, against the untouched network, on this machine."""

from functools import partial

from ltm.cli.commands import Flat, OptionalInt, OptionalPath, Words, say
from ltm.evaluation.settings import BenchmarkSettings
from ltm.models import ModelSource, refuse_given


def benchmark(
    settings: Flat[BenchmarkSettings],
    *,
    models: Words = None,
    methods: Words = None,
    pretrained: bool = False,
    weights: OptionalPath = None,
    run: OptionalPath = None,
    image_size: OptionalInt = None,
    model_args: Words = None,
    output: OptionalPath = None,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Measure how much faster merging is on this machine.

    All methods and modes take turns in rounds, in a different order each round. A speed-up is the
    median of the rounds' ratios, with a 95% interval. The baseline is the original with fused
    attention, once in the same mode and once in its own fastest mode. "no gain here" means that the
    interval touches 1.

    Rows are written as they are measured. With --resume, several runs can share a long grid, even
    at the same time: they compile in parallel, take turns at timing, and measure nothing twice.

    Example:
        ltm benchmark --models vit_base_patch16_224 --methods tome,ltm,ltm-static
            --batch-sizes 1,128 --modes eager,cudagraph --dtypes fp16 --output runs/speed

    Args:
        settings: What is timed, and how.
        models: Names of timm's networks; by default vit_small_patch16_224.
        methods: Names of methods; by default tome and ltm. There are also ltm-static, ltm-uniform
            (matching alone) and tome-reference (the published algorithm). Settings follow a
            colon, as in ltm:ratio=0.5,sites=3+5+8.
        pretrained: Use timm's pretrained weights; by default weights are random.
        weights: Use the weights of a .safetensors or .pth file with timm's keys.
        run: Time a saved network against itself without merging, instead of --models.
        image_size: Image size in pixels; by default the size that the model was made for.
        model_args: Further arguments of the model, such as depth=4.
        output: Folder for metrics.json and table.md.
        resume: Add to the results in that folder, and skip what they hold already.
        overwrite: Replace the results in that folder.
    """
    network = partial(
        ModelSource,
        pretrained=pretrained,
        weights=weights,
        image_size=image_size,
        model_args=model_args or (),
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
