"""`ltm evaluate`: how good a network is with and without merging, on the same images."""

from ltm.cli.commands import Flat, OptionalPath, interrupted, say
from ltm.evaluation.settings import EvaluateSettings
from ltm.files import output_folder
from ltm.models import ModelSource


def evaluate(
    source: Flat[ModelSource],
    settings: Flat[EvaluateSettings],
    *,
    data: str,
    output: OptionalPath = None,
    overwrite: bool = False,
) -> None:
    """Compare the accuracy and cost of methods on the same images.

    Prints parameters, GMACs, top-1 and top-5 with 95% intervals, agreement with the original and
    divergence from its outputs, calibration error, and the information-bottleneck loss and bound
    of every block. All networks see the same images, so differences are paired. For several
    processes: torchrun --nproc-per-node 2 --no-python ltm evaluate ...

    Example:
        ltm evaluate --data imagenet/val --model vit_small_patch16_224 --pretrained
            --methods tome,ltm --ratio 0.7 --output runs/evaluation

    Args:
        source: Which network; a saved one is compared with itself without merging.
        settings: What is compared, and on which images.
        data: Folder or .zip of class folders, tar shards, hf:NAME, or the word shapes for
            generated images.
        output: Folder for metrics.json.
        overwrite: Replace another run's results there.
    """
    with output_folder(output, overwrite=overwrite):
        from ltm.evaluation import evaluate as verb
        from ltm.processes import is_first

        result = verb.evaluate(source, data, settings, say=say)
        if is_first():
            print(result)
            if output is not None:
                result.save(output)
    if result.interrupted:
        interrupted("Stopped early.")
