"""`ltm embed`: embeddings of any number of images, as Parquet files."""

from pathlib import Path

from ltm.cli.commands import Flat, Inputs, interrupted, say
from ltm.deployment.settings import EmbedSettings
from ltm.models import ModelSource


def embed(
    inputs: Inputs,
    source: Flat[ModelSource],
    settings: Flat[EmbedSettings],
    *,
    output: Path,
    overwrite: bool = False,
) -> None:
    """Write embeddings of images, and their likeliest classes, as Parquet files.

    Takes folders, .zip archives, tar shards of images or of 8-bit .npy arrays, Parquet files with
    image bytes, hf:NAME and lists of paths (.txt). Each tar shard or Parquet file becomes one file
    part-00000.parquet with the columns id, path, embedding (float16), classes, indices,
    probabilities and error; other images are grouped by --shard-rows. A file is written whole or
    not at all, and --resume continues a stopped run. An image that cannot be read becomes a row
    that says why.

    Example:
        ltm embed 'crawl-{000..099}.tar' --run runs/small --workers 8 --output runs/embeddings
        ltm embed photos/ --model vit_large_patch14_dinov2 --pretrained --output runs/embeddings

    Args:
        inputs: Folders, archives, shards, lists of paths, or - for paths from standard input.
        source: Which network.
        settings: What is written, how images are prepared, and who does the work.
        output: Folder for the Parquet files and metrics.json.
        overwrite: Replace another run's files there.
    """
    from ltm.deployment import embedding
    from ltm.processes import is_first

    result = embedding.embed(source, inputs, output, settings, overwrite=overwrite, say=say)
    if result.interrupted:
        interrupted(f"Stopped early; --resume goes on. {result}")
    if is_first():
        say(str(result))
