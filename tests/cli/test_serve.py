"""`ltm serve` at the door; the page itself is tested in tests/demo."""

import os
import socket
import sys
from pathlib import Path

import pytest
import timm

import ltm
from ltm.cli import main
from ltm.models import ModelSource
from ltm.web.networks import SAVED, own_network
from ltm.web.settings import ServeSettings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "0"], "port is 0, but must be from 1 to 65535"),
        (["--host", "203.0.113.1"], "on 203.0.113.1 cannot be used"),
        (["--port", "7899", "--embedded"], "embedded is empty, so there is no network to show"),
        (["--port", "7899", "--run", "nowhere"], "run is nowhere: there is no such folder"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_taken_port_is_said_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 cannot be used: Address already in use" in (
        capsys.readouterr().err
    )


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["serve", "--port", "7899", "--embedded", "demo_vit"]) == 2
    assert "gradio is not installed" in (said := capsys.readouterr().err)
    assert "pip install 'ltm[web]'" in said


def test_a_saved_network_comes_with_its_merging_and_its_names(tmp_path: Path) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2,
        num_classes=3,
    ).eval()  # fmt: skip
    ltm.merge_tokens_(model, ltm.ToMe(sites=(1,), counts=(9,)))
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\nfox\n", encoding="utf-8")
    own = own_network(
        model, ModelSource(run=tmp_path), ServeSettings(class_names=names, crop_ratio=0.8)
    )
    assert own.class_names == ("cat", "dog", "fox")
    assert own.methods[0] == SAVED
    assert own.spec.crop_ratio == 0.8
    assert own.spec.size == (32, 32)
