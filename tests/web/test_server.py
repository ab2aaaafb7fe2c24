"""The server: refuses with a message and serves on; keeps to its folder and to this machine."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from serving import Served

pytestmark = pytest.mark.slow

CHOSEN = ("demo_vit (generated shapes)", "LTM", 0.7, 5)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    gradio_client = pytest.importorskip("gradio_client")
    connected = gradio_client.Client(served.address, verbose=False, download_files=False)
    yield connected
    connected.close()


def upload(client: Any, path: Path) -> tuple[Any, str]:
    from gradio_client import handle_file

    return client.predict(handle_file(str(path)), api_name="/upload")


def look(client: Any, path: Path) -> Any:
    from gradio_client import handle_file

    return client.predict(handle_file(str(path)), *CHOSEN, api_name="/look")


def test_pictures_are_shown_and_all_else_is_refused(
    served: Served, client: Any, picture: Path, tmp_path: Path
) -> None:
    httpx = pytest.importorskip("httpx")
    assert upload(client, picture)[1] == ""
    words = tmp_path / "words.png"
    words.write_text("these are words", encoding="utf-8")
    assert "not a readable picture" in upload(client, words)[1]
    vast = tmp_path / "vast.png"
    Image.new("1", (8000, 7000)).save(vast)
    assert "The picture has 56 megapixels; at most 50" in upload(client, vast)[1]
    # Past the client, which refuses it before it is sent.
    large = {"files": ("large.png", bytes(21 * 2**20))}
    answer = httpx.post(f"{served.address}gradio_api/upload", files=large, timeout=30)
    assert answer.status_code == 413
    assert "exceeded maximum allowed size of 20971520 bytes" in answer.text
    before, after, *_ = look(client, picture)
    assert len(before["confidences"]) == len(after["confidences"]) == 5


def test_what_cannot_be_done_is_an_error_with_a_sentence(client: Any, picture: Path) -> None:
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    too_little = ("demo_vit (generated shapes)", "ToMe", 0.1, 1)
    with pytest.raises(AppError, match="cannot go below"):
        client.predict(handle_file(str(picture)), *too_little, api_name="/look")
    assert upload(client, picture)[1] == ""


def test_only_this_machine_can_connect(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=5):
        pass
    # A server on every address would answer on all of 127.0.0.0/8.
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", served.port), timeout=5)


@pytest.mark.exhaustive
def test_requests_in_a_row_and_at_once_leave_memory_flat(
    served: Served, client: Any, picture: Path
) -> None:
    def at_once() -> None:
        with ThreadPoolExecutor(4) as pool:
            assert len(list(pool.map(lambda _: look(client, picture), range(4)))) == 4

    at_once()
    before = served.resident_bytes
    for _ in range(3):
        look(client, picture)
    at_once()
    assert served.resident_bytes - before < 24 * 2**20


def test_nothing_is_written_outside_its_folder(served: Served, client: Any, picture: Path) -> None:
    look(client, picture)
    folder = str(next(served.temporary.glob("ltm-serve-*")))
    lines = served.said.partition("Serving on")[2].splitlines()
    written = [line.removeprefix("wrote ") for line in lines if line.startswith("wrote ")]
    assert any(path.startswith(folder) for path in written)
    assert [path for path in written if not path.startswith(folder)] == []
