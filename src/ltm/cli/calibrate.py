"""`ltm calibrate`: where a network merges, how much and how, chosen on unlabelled images."""

from ltm.calibration.settings import CalibrateSettings
from ltm.cli.commands import Flat, OptionalPath, interrupted, say
from ltm.files import output_folder
from ltm.models import ModelSource


def calibrate(
    source: Flat[ModelSource],
    settings: Flat[CalibrateSettings],
    *,
    data: str,
    output: OptionalPath = None,
    overwrite: bool = False,
) -> None:
    """Find the best places to merge in a network, on images without labels.

    Tries schedules within a budget and keeps the one whose outputs stay closest to the original's.
    A schedule says which blocks merge, how many tokens they keep, whether tokens are merged or
    dropped, and whether tokens that receive much attention are protected. Ctrl-C stops the search
    and keeps the best so far. Give the output folder to other commands with --run.

    Example:
        ltm calibrate --model vit_small_patch16_224 --pretrained --data imagenet/train
            --budget 0.7 --output runs/calibrated

    Args:
        source: Which network.
        settings: The budget, and how to search.
        data: Folder or .zip of images, in class folders or not, tar shards, hf:NAME, or the word
            shapes for generated images.
        output: Folder for the network and metrics.json.
        overwrite: Replace another run's results there.
    """
    with output_folder(output, overwrite=overwrite, written=("config.json", "model.safetensors")):
        from ltm.calibration import calibration

        result = calibration.calibrate(source, data, settings, say=say)
        print(result)
        if output is not None:
            if source.run is not None:
                print("The mask modules start anew: they were trained for other sites.")
            result.save(output, model=source.model or str(source.run))
    if result.interrupted:
        kept = "" if output is None else f"; {output} holds it"
        interrupted(f"Stopped early: this is the best of {len(result.history)} trials{kept}.")
