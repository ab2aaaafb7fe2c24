"""`ltm export`: a network as files that other programs run."""

from pathlib import Path

from ltm.cli.commands import Flat, say
from ltm.deployment.settings import ExportSettings
from ltm.files import output_folder
from ltm.models import ModelSource


def export(
    source: Flat[ModelSource],
    settings: Flat[ExportSettings],
    *,
    output: Path = Path("runs/export"),
    overwrite: bool = False,
) -> None:
    """Write a network as an ONNX, torch.export, AOTInductor or OpenVINO file, in float or int8.

    A file takes any batch size. The ONNX file holds its preprocessing and class names. Every file
    is compared with the network on images of --data, and deleted if its outputs differ. For int8
    files, accuracy and speed are measured against the float file.

    Example:
        ltm export --run runs/small --data imagenet/val --int8 accurate --output runs/export

    Args:
        source: Which network.
        settings: What to write, and which images to check it on.
        output: Folder for the files and metrics.json.
        overwrite: Replace another run's results there.
    """
    with output_folder(output, overwrite=overwrite):
        from ltm.deployment import export as exporting

        print(exporting.export(source, output, settings, say=say))
