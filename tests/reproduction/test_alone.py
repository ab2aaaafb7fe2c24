"""Training in processes of its own."""

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ltm.training.settings import to_yaml
from reproduction.alone import main
from reproduction.place import Place
from reproduction.requests import base
from reproduction.scales import make_scale
from reproduction.scales.base import Sources
from reproduction.work.classify import history, last_network, train_there

SETTINGS = base(make_scale("smoke", Sources()).sweep, 0).settings


def test_it_trains_with_the_settings_of_a_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(to_yaml(replace(SETTINGS, run=replace(SETTINGS.run, device="cpu"))))
    main(str(config), str(tmp_path / "run"))
    assert [epoch["epoch"] for epoch in history(tmp_path / "run")] == [1]
    model, trained = last_network(SETTINGS, tmp_path / "run", 4, None)
    assert trained == sum(parameter.numel() for parameter in model.parameters())


def test_several_devices_are_started_apart(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_options: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1, stderr="words\nValueError: the reason\n")

    monkeypatch.setattr(subprocess, "run", run)
    settings = replace(SETTINGS, run=replace(SETTINGS.run, devices=4))
    with pytest.raises(RuntimeError, match="in 4 processes failed: ValueError: the reason"):
        train_there(settings, tmp_path / "run", replace(place, devices=4))
    assert commands[0][1:3] == ["-m", "reproduction.alone"]
    assert "devices: 4" in Path(commands[0][3]).read_text()
