"""The same words mean the same in every command: configs, tensors and errors.

`calibrate` converts by itself once it searches, and `predict` takes no method: their tests look at
what they were told and have loaded by then.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import ltm
from ltm.adapters.planning import Planner
from ltm.calibration.calibration import Calibration
from ltm.cli import main
from ltm.deployment import predictor
from ltm.models import changed, did_you_mean, method_config, read_value, read_words, split_methods
from ltm.training.network import method_config as training_config
from ltm.training.settings import TrainSettings

DATA = "shapes:classes=5,size=48,images=40,val_images=40"
PICTURE = str(Path(__file__).resolve().parents[1] / "docs" / "images" / "merging.png")
SMALL = {"depth": 4, "embed_dim": 24, "num_heads": 2}
ARGUMENTS = ["--model-args", *(f"{name}={value}" for name, value in SMALL.items())]

SAME = ("sites=1,2", "sites=1+2", "sites=[1, 2]", "sites=(1,2)", "sites=[1,2],", "sites= 1, 2")


@pytest.mark.parametrize("words", SAME)
def test_lists_may_be_written_as_people_do(words: str) -> None:
    expected = ltm.LTM(ratio=0.7, sites=(1, 2))
    assert method_config(f"ltm:{words}", 0.7) == expected
    assert method_config("ltm", 0.7, options=[words]) == expected
    assert method_config(f"ltm:{words},ratio=0.7", 0.5) == expected
    assert method_config(f"ltm:ratio=0.7,{words}") == expected
    merge = changed(
        TrainSettings(), {"merge": {"method": "ltm", "ratio": 0.7, "method_options": [words]}}
    ).merge
    assert training_config(merge) == expected


def test_values_are_read_by_the_type_of_their_field() -> None:
    config: Any = method_config("ltm:support=learned,labels=true,beta=1e1,mlp=true")
    assert config.to_settings()["labels"] == "true"
    assert config.to_settings()["beta"] == 10.0
    assert config.to_settings()["mlp"] is True
    grids = ltm.LTM(counts=((7, 7), (5, 5)))
    for words in (
        "counts=7x7,5x5",
        "counts=7x7+5x5",
        "counts=[[7,7],[5,5]]",
        "counts=((7,7),(5,5))",
    ):
        assert method_config(f"ltm:{words}") == grids
    assert method_config("ltm:counts=9,8,sites=1,2") == ltm.LTM(counts=(9, 8), sites=(1, 2))
    settings = changed(
        TrainSettings(), {"optim": {"lr": "1e-3", "epochs": "3"}, "tune": {"unfreeze": "head.*"}}
    )
    assert (settings.optim.lr, settings.optim.epochs) == (1e-3, 3)
    assert settings.tune.unfreeze == ("head.*",)
    assert read_value("none", int | None, "it") is None
    assert read_value("32", str, "it") == "32"
    assert read_value("runs/a", Path | None, "it") == Path("runs/a")


def test_methods_are_split_with_their_settings() -> None:
    text = "tome,ltm:sites=3,5,ratio=0.5,ltmp"
    assert split_methods([text]) == ["tome", "ltm:sites=3,5,ratio=0.5", "ltmp"]
    assert split_methods(["ltm:sites=[3, 5]", "tofu"]) == ["ltm:sites=[3, 5]", "tofu"]
    assert split_methods(["tome,tomee"]) == ["tome", "tomee"]
    assert split_methods(["ltm:sites=3,5,other"], "other") == ["ltm:sites=3,5", "other"]


def test_values_without_a_type_are_guessed() -> None:
    words = ["depth=4", "rate=1e-3", "flag=True", "none=None", "size=32x48", "window=(4,4)"]
    words += ["channels=8,16", "name='a'", "act=gelu", "more={a: 1, b: [2, 3]}"]
    assert read_words(words, owner="model_args") == {
        "depth": 4, "rate": 1e-3, "flag": True, "none": None, "size": [32, 48], "window": [4, 4],
        "channels": [8, 16], "name": "a", "act": "gelu", "more": {"a": 1, "b": [2, 3]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ltm:wings=2", "ltm has no setting wings; did you mean"),
        ("ltm:site=2", "ltm has no setting site; did you mean sites"),
        ("ltm:sites=a", "ltm: sites is 'a', but must be a whole number"),
        ("ltm:sites=1.5", "ltm: sites is '1.5', but must be a whole number"),
        ("ltm:labels=hard", "ltm: labels is 'hard'; choose from soft, true"),
        ("ltm:support", "ltm: 'support' is no setting; write name=value"),
        ("tomee", "method tomee is not known"),
    ],
)
def test_wrong_words_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as stop:
        method_config(text)
    assert "\n" not in str(stop.value)
    assert did_you_mean("epoch", ["epochs", "lr"]) == "did you mean epochs?"


class Converting(BaseException):
    """Raised where a command converts a network, or has loaded it, with all it was told."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.model, self.config = model, config


@pytest.fixture
def converting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Converting]:
    """Run a command up to its first conversion."""

    def stop(_: Planner, model: nn.Module, _adapter: Any, config: Any, _size: Any) -> None:
        raise Converting(model, config)

    def search(_: Calibration, model: nn.Module, _images: Any, config: Any, _told: Any) -> None:
        raise Converting(model, config)

    def run_as_it_is(model: nn.Module, *_: Any, **__: Any) -> None:
        raise Converting(model, None)

    def run(*words: str) -> Converting:
        with pytest.raises(Converting) as stopped:
            main([*words, "--output", str(tmp_path / "out")])
        return stopped.value

    monkeypatch.setattr(Planner, "__init__", stop)
    monkeypatch.setattr(Calibration, "__init__", search)
    monkeypatch.setattr(predictor, "known_about", run_as_it_is)
    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights beside their moving average, as training frameworks write them."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5, img_size=48, **SMALL)
    raw = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    path = tmp_path_factory.mktemp("words") / "checkpoint.pth"
    torch.save({"state_dict": raw, "state_dict_ema": model.state_dict(), "epoch": 3}, path)
    return path


def command(name: str, method: str, checkpoint: Path) -> list[str]:
    """A call that merges by a method, on the network of a checkpoint."""
    text, _, options = method.partition(":")
    network = ["--model", "test_vit", "--weights", str(checkpoint), *ARGUMENTS]
    data = ["--data", DATA, "--workers", "0"]
    sized = ["--image-size", "48"]
    told = {
        "compress": ["--method", method, *network, *data, *sized],
        "evaluate": ["--methods", method, *network, *data, *sized],
        "export": ["--method", method, *network, *data, *sized],
        "calibrate": ["--method", method, *network, *data, *sized, "--budget", "0.7"],
        "predict": [PICTURE, *network, *sized],
        "visualize": ["--method", method, *network, *sized],
        "benchmark": ["--methods", method, "--models", *network[1:], *sized, "--batch-sizes", "1"],
        "train": [
            "--method", text, *network, *data, *sized,
            *(["--method-options", options] if options else []),
        ],
        "finetune": [
            "--method", text, *network, *data, *sized,
            *(["--method-options", options] if options else []),
        ],
    }  # fmt: skip
    return [name, *told[name]]


COMMANDS = (
    *("compress", "calibrate", "evaluate", "export", "visualize", "benchmark", "train", "finetune"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reads_the_same_config_and_the_same_tensors(
    name: str, checkpoint: Path, converting: Callable[..., Converting]
) -> None:
    average = torch.load(checkpoint, weights_only=True)["state_dict_ema"]
    found = [converting(*command(name, f"ltm:{words}", checkpoint)) for words in SAME[:4]]
    assert len({one.config for one in found}) == 1
    assert found[0].config == ltm.LTM(ratio=0.7, sites=(1, 2))
    assert_same(found[0].model, average)
    true = converting(*command(name, "ltm:support=learned,labels=true", checkpoint)).config
    assert true.to_settings()["labels"] == "true"


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[key], rtol=0, atol=0, msg=key)


@pytest.mark.slow
def test_a_network_that_is_only_run_is_the_same(
    checkpoint: Path, converting: Callable[..., Converting]
) -> None:
    average = torch.load(checkpoint, weights_only=True)["state_dict_ema"]
    assert_same(converting(*command("predict", "", checkpoint)).model, average)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, "predict"])
def test_every_command_says_the_same_about_wrong_words(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "nowhere.pth: there is no such file": command(name, "ltm", tmp_path / "nowhere.pth"),
        "model test_vitt is not known to timm; did you mean test_vit": [
            "test_vitt" if word == "test_vit" else word for word in command(name, "ltm", checkpoint)
        ],
    }
    if name != "predict":  # it takes no method
        wrong |= {
            "ltm has no setting wings": command(name, "ltm:wings=2", checkpoint),
            "ltm: sites is 'a', but must be a whole": command(name, "ltm:sites=a", checkpoint),
        }
    for sentence, words in wrong.items():
        assert main([*words, "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"ltm {name}: ")
        assert sentence in error
        assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, "predict"])
def test_it_is_said_which_weights_were_taken(
    name: str,
    checkpoint: Path,
    converting: Callable[..., Converting],
    capsys: pytest.CaptureFixture[str],
) -> None:
    converting(*command(name, "ltm", checkpoint))
    said = "".join(capsys.readouterr())
    assert "the moving average of the weights, entry state_dict_ema of checkpoint.pth" in said
