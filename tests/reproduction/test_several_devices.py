"""Training on several devices, in processes of their own."""

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ltm.cli import main
from ltm.training.settings import to_yaml
from reproduction.running.context import Context
from reproduction.running.training import history, last_network, train_there
from reproduction.scales import make_scale
from reproduction.scales.base import Sources
from reproduction.tables.shared_jobs import base

SETTINGS = base(make_scale("smoke", Sources()).sweep, 0).settings


def test_it_trains_with_the_settings_of_a_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(to_yaml(replace(SETTINGS, run=replace(SETTINGS.run, device="cpu"))))
    assert main(["train", "--config", str(config), "--output", str(tmp_path / "run")]) == 0
    assert [epoch["epoch"] for epoch in history(tmp_path / "run")] == [1]
    model, trained = last_network(SETTINGS, tmp_path / "run", 4, None)
    assert trained == sum(parameter.numel() for parameter in model.parameters())


def test_several_devices_are_started_apart(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_options: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1, stderr="words\nValueError: the reason\n")

    monkeypatch.setattr(subprocess, "run", run)
    settings = replace(SETTINGS, run=replace(SETTINGS.run, devices=4))
    with pytest.raises(RuntimeError, match="in 4 processes failed: ValueError: the reason"):
        train_there(settings, tmp_path / "run", replace(context, devices=4))
    assert commands[0][1:4] == ["-m", "ltm", "train"]
    assert "devices: 4" in Path(commands[0][5]).read_text()
