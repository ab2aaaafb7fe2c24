"""`ltm compress`: from a trained network and labelled images to a smaller one, with a report."""

from pathlib import Path

from ltm.cli.commands import Flat, command_line, interrupted, say
from ltm.compression.settings import CompressSettings
from ltm.files import output_folder
from ltm.models import ModelSource


def compress(
    source: Flat[ModelSource],
    settings: Flat[CompressSettings],
    *,
    data: str,
    output: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Make a trained network smaller and faster, and report what that gained and lost.

    Converts the network, chooses where to merge on unlabelled images, fine-tunes if asked to,
    freezes and saves it with a model card; evaluates it against the original and the methods in
    --compare on the same labelled images, times them, and writes report.html and metrics.json.
    Networks are timed in the forms that people deploy, each against the original in the same form;
    one of them is recommended, with the code that runs it. Ctrl-C stops, and keeps what is done.

    Example:
        ltm compress --model vit_small_patch16_224 --pretrained --data imagenet/val --max-loss 0.5
            --export --output runs/small

    Args:
        source: which network.
        settings: how to merge, what to choose on images, and what to measure.
        data: folder or .zip of class folders, tar shards, hf:NAME, or shapes (generated).
        output: folder for the model and the report; by default below runs/.
        overwrite: replace another run's results there.
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
