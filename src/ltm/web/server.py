"""Serve the page: on this machine alone, without a network, in a folder of its own."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltm.extras import require
from ltm.web.networks import Gallery
from ltm.web.uploads import MAX_BYTES

LOCAL = "127.0.0.1"
THREADS = 4
"""Pictures are looked at one after the other; further threads would only wait."""
_M_ARENA_MAX = -8
"""glibc's name of the setting, in malloc.h."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Server:
    """A page that is being served."""

    address: str
    folder: Path
    """The only folder that is written to; it goes with the server."""
    desk: Any
    page: Any

    def wait(self) -> None:
        """Serve until somebody interrupts."""
        self.page.block_thread()


@contextmanager
def serving(
    gallery: Gallery, *, host: str = LOCAL, port: int | None = None, examples: int = 6
) -> Iterator[Server]:
    """Serve the page inside the `with`."""
    _share_memory()
    with tempfile.TemporaryDirectory(prefix="ltm-serve-") as temporary:
        # Gradio reads these when it is imported.
        os.environ["GRADIO_TEMP_DIR"] = temporary
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_CHECK_UPDATES"] = "False"
        gr = require("gradio", extra="web")
        from ltm.data.shapes import example_pictures  # noqa: PLC0415
        from ltm.web.page import Desk, build_page  # noqa: PLC0415
        from ltm.web.rendering import CSS  # noqa: PLC0415

        desk = Desk(gallery, example_pictures(examples))
        page = build_page(desk)
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=False,
            prevent_thread_lock=True,
            quiet=True,
            show_error=True,
            footer_links=[],
            max_file_size=MAX_BYTES,
            max_threads=THREADS,
            state_session_capacity=64,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            theme=gr.themes.Base(
                font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
            ),
            css=CSS,
        )
        try:
            yield Server(address=address, folder=Path(temporary), desk=desk, page=page)
        finally:
            page.close(verbose=False)


def _share_memory() -> None:
    """Let all threads allocate from one arena (glibc): each would keep what it has freed."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt = getattr(libc, "mallopt", None)  # other C libraries have none, and need none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
