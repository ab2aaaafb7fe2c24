"""`ltm serve`: see merging in a browser."""

import sys
from functools import partial

from ltm.cli.commands import Flat, OptionalPath
from ltm.files import output_folder, write_metrics
from ltm.models import ModelSource
from ltm.web.settings import ServeSettings


def serve(
    source: Flat[ModelSource],
    settings: Flat[ServeSettings],
    *,
    output: OptionalPath = None,
    overwrite: bool = False,
) -> None:
    """Show in a browser what merges, and what it does to predictions and time.

    It works offline: a network trained on generated shapes comes with the package. Your own network
    comes first in the list. Only this machine can see the page unless --host says otherwise.
    Ctrl-C ends it.

    Example:
        ltm serve
        ltm serve --run runs/small --port 8000

    Args:
        source: Your own network, if any.
        settings: What the page offers, and where it listens.
        output: Folder for metrics.json, written at the end.
        overwrite: Replace another run's results there.
    """
    with output_folder(output, overwrite=overwrite):
        from ltm.web import server

        counts = server.serve(source, settings, say=partial(print, file=sys.stderr, flush=True))
        write_metrics(output, counts)
    if counts["interrupted"]:
        raise KeyboardInterrupt
