"""Serve the page: on this machine alone, offline, with one temporary folder.

`serve` is what `ltm serve` calls; `serving` is for code that goes on beside the page.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltm.extras import require
from ltm.models import ModelSource, Say, refuse_given, silent
from ltm.web.networks import (
    Networks,
    ShownNetwork,
    embedded_network,
    embedded_pictures,
    own_network,
)
from ltm.web.settings import ServeSettings

_THREADS = 4
"""Pictures are inspected one after the other; more threads would only wait."""
_LOOK_SECONDS = 0.5
"""Seconds between looks whether a signal asks the server to end."""
_M_ARENA_MAX = -8
"""glibc's name of the setting, in malloc.h."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Server:
    """A page that is being served."""

    address: str
    folder: Path
    """The only folder that is written to; it is deleted with the server."""
    handlers: Any
    page: Any

    def wait(self) -> bool:
        """Serve until Ctrl-C, or until SIGTERM, which ends services; whether it was Ctrl-C."""
        ended = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
        try:
            # In turns: a signal that comes just before a wait begins is only seen after it.
            while not ended.wait(_LOOK_SECONDS):
                pass
        except KeyboardInterrupt:
            return True
        finally:
            signal.signal(signal.SIGTERM, before)
        return False


def serve(source: ModelSource, settings: ServeSettings, *, say: Say = silent) -> dict[str, float]:
    """Serve the page until Ctrl-C or SIGTERM; returns how many requests there were.

    Args:
        source: a network of one's own, which comes first in the list; it may name none.
        settings: what the page offers, and where it listens.
        say: is told the page's address, and which weights of a file are shown.
    """
    _check_free(settings.host, settings.port)
    began = time.monotonic()
    networks = {network.name: network for network in _networks(source, settings, say)}
    with serving(Networks(networks), host=settings.host, port=settings.port) as server:
        say(f"Serving on {server.address} (Ctrl-C ends it)")
        interrupted = server.wait()
        handlers = server.handlers
        counts = {"requests": handlers.num_requests, "refused": handlers.num_refused}
    seconds = round(time.monotonic() - began, 1)
    return {**counts, "seconds": seconds, "interrupted": interrupted}


def _networks(source: ModelSource, settings: ServeSettings, say: Say) -> list[ShownNetwork]:
    if source.run is None and source.model is None:
        refuse_given({**source.given(), **settings.given()}, "the network of the package")
        if not settings.embedded:
            raise ValueError(
                "embedded is empty, so there is no network to show: name one, or give --run"
            )
        return [embedded_network(name) for name in settings.embedded]
    own = own_network(source.load(say=say), source, settings)
    return [own, *(embedded_network(name) for name in settings.embedded)]


def _check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before anything is loaded."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"port {port} on {host} cannot be used: {reason}") from error


@contextmanager
def serving(
    networks: Networks, *, host: str = "127.0.0.1", port: int | None = None
) -> Iterator[Server]:
    """Serve the page inside the `with`."""
    _share_memory()
    with tempfile.TemporaryDirectory(prefix="ltm-serve-") as temporary:
        # Gradio reads these when it is imported.
        os.environ["GRADIO_TEMP_DIR"] = temporary
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_CHECK_UPDATES"] = "False"
        gr = require("gradio")
        from ltm.web.page import MAX_BYTES, Handlers, build_page  # noqa: PLC0415
        from ltm.web.rendering import CSS  # noqa: PLC0415

        handlers = Handlers(networks, embedded_pictures(6))
        page = build_page(handlers)
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
            max_threads=_THREADS,
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
            yield Server(address=address, folder=Path(temporary), handlers=handlers, page=page)
        finally:
            page.close(verbose=False)
            # A thread that is still in PyTorch when Python ends would abort the process.
            handlers.close()


def _share_memory() -> None:
    """Let all threads share one arena of glibc, since each arena keeps the memory that it frees."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt = getattr(libc, "mallopt", None)  # other C libraries have none, and need none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
