"""`ltm compress`: from a trained network and images to a smaller one, with a report."""

from pathlib import Path

from ltm.cli.commands import Flat, OptionalPath, command_line, interrupted, say
from ltm.compression.settings import CompressSettings
from ltm.files import output_folder
from ltm.models import ModelSource


def compress(
    source: Flat[ModelSource],
    settings: Flat[CompressSettings],
    *,
    data: str,
    output: OptionalPath = None,
    overwrite: bool = False,
) -> None:
    """Make a trained network faster, and report what it gains and loses.

    1. Converts the network, and chooses where to merge by looking at images without their labels.
    2. Tunes or fine-tunes it if you ask for it, then freezes and saves it.
    3. Measures accuracy and speed on this machine. The original and the methods in --compare are
       measured on the same images and in the same way. If the images have no labels, agreement with
       the original is measured, not accuracy.
    4. Writes report.html, metrics.json and a model card, and recommends a form to deploy.

    Ctrl-C stops it and keeps what is done.

    Example:
        ltm compress --model vit_small_patch16_224 --pretrained --data imagenet/val --max-loss 0.5
            --export --output runs/small

    Args:
        source: Which network.
        settings: How to merge, what to choose on images, and what to measure.
        data: Folder or .zip of images, in class folders or not, tar shards, hf:NAME, or the word
            shapes for generated images.
        output: Folder for the network and the report; by default a new one in runs/.
        overwrite: Replace another run's results there.
    """
    command = command_line("compress", source, settings, data=data, output=output)
    if output is None:
        method = settings.method.partition(":")[0]
        chosen = settings.num_points or settings.has_goal
        name = f"{source.name.replace('/', '-')}-{method}"
        output = Path("runs") / (name if chosen else f"{name}-{settings.ratio:g}")
    written = ("README.md", "config.json", "model.safetensors")
    with output_folder(output, overwrite=overwrite, written=written):
        from ltm.compression import compress as verb

        result = verb.compress(source, data, settings, folder=output, command=command, say=say)
        result.save(output)
    print(result)
    say(f"Report: {output / 'report.html'}")
    if result.interrupted:
        interrupted(
            f"Stopped during {result.interrupted}; {output} holds what was done until then."
        )
