"""One server for all tests of the page."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltm.data.shapes import example_pictures
from serving import Served, start


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that must end well: exit code 0, its folder gone, its metrics written."""
    pytest.importorskip("gradio", reason="the extra ltm[web] is not installed")
    running = start(tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("output"))
    try:
        running.wait_until_serving()
        yield running
        assert running.end() == 0
    finally:
        running.process.kill()
        running.process.wait()
    assert list(running.temporary.iterdir()) == []
    metrics = json.loads((running.output / "run" / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["requests"] > metrics["refused"] >= 0


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture to upload."""
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    example_pictures(3)[2].image.save(path)
    return path
