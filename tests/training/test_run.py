"""Whole runs, of seconds: what they leave behind, and what they refuse."""

import csv
import errno
import io
import json
import os
import tempfile
from collections.abc import Callable
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import ltm
from ltm.api import conversion_of, is_merging, mergers, merging_off
from ltm.data.datasets import open_splits
from ltm.data.loading import evaluation_loader
from ltm.data.transforms import image_spec
from ltm.training.checkpoint import Checkpoints, DamagedCheckpointWarning, OutOfSpaceError
from ltm.training.network import build, load_weights_, save_model
from ltm.training.non_finite import NonFiniteLossError, find_non_finite
from ltm.training.recipes import FINETUNE, SCRATCH
from ltm.training.run import train
from ltm.training.settings import TrainSettings, read_settings
from ltm.training.trainer import Trainer

Tiny = Callable[..., TrainSettings]


def top1(model: nn.Module, settings: TrainSettings) -> float:
    val = open_splits(settings.data).val
    loader = evaluation_loader(val, image_spec(settings.data, model), settings.data)
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(val)


def read_log(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO((folder / "log.csv").read_text())))


def weights(folder: Path, epoch: int) -> dict[str, torch.Tensor]:
    found = Checkpoints(folder / "checkpoints").latest()
    assert found is not None
    assert found.epoch == epoch
    return found.weights()


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not first[name].equal(second[name])] == []


def test_a_run_leaves_all_that_it_promises(tiny: Tiny, tmp_path: Path) -> None:
    settings = tiny(merge={"warm_epochs": 1}, optim={"epochs": 3})
    result = train(settings=settings, output=tmp_path / "run")
    folder = result.folder
    assert read_settings(folder / "config.yaml", TrainSettings()) == settings
    rows = read_log(folder)
    assert [row["merging"] for row in rows] == ["False", "True", "True"]
    assert [float(row["noise"]) for row in rows] == [0.0, 1.0, 0.0]
    assert rows[0]["ib_loss"] == ""
    assert float(rows[2]["ib_loss"]) <= float(rows[2]["ib_bound"]) + 2.0
    assert rows[2]["tokens"] == "12 9"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").iterdir())
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics == result.metrics
    assert metrics["epoch"] > 1  # the warm-up epoch does not count as the best
    loaded = ltm.load(folder / "model", model=_host(settings))
    assert top1(loaded, settings) == pytest.approx(metrics["top1"])
    assert all(merger.active for _, merger in mergers(loaded))
    assert json.loads((folder / "model" / "config.json").read_text())["token_merging"]


def _host(settings: TrainSettings) -> nn.Module:
    from ltm.training.network import make_timm_model

    return make_timm_model(settings, 3)


def test_a_folder_with_a_run_is_not_touched(tiny: Tiny, tmp_path: Path) -> None:
    settings = tiny(optim={"epochs": 1}, merge={"method": "none", "method_options": []})
    train(settings=settings, output=tmp_path)
    with pytest.raises(ValueError, match="holds a run already; continue it with --resume auto"):
        train(settings=settings, output=tmp_path)
    changed = tiny(optim={"epochs": 1, "lr": 0.5}, merge={"method": "none", "method_options": []})
    with pytest.raises(ValueError, match=r"other settings: optim.lr is 0.5 but was 0.001"):
        train(settings=changed, output=tmp_path, resume="auto")
    other = tiny(
        optim={"epochs": 2}, merge={"method": "none", "method_options": []}, run={"seed": 1}
    )
    with pytest.raises(ValueError, match=r"other settings: run.seed is 1 but was 0"):
        train(settings=other, output=tmp_path, resume="auto")
    again = train(settings=settings, output=tmp_path, resume="auto")  # nothing left to do
    assert len(again.history) == 1
    assert not is_merging(again.model)
    rebuilt = _host(settings)
    load_weights_(rebuilt, tmp_path)
    assert top1(rebuilt.eval(), settings) == pytest.approx(again.metrics["top1"])


def test_a_truncated_checkpoint_is_repeated_exactly(tiny: Tiny, tmp_path: Path) -> None:
    settings = tiny(optim={"epochs": 3}, augment={"mixup": 0.5, "repeats": 2})
    train(settings=settings, output=tmp_path)
    expected = weights(tmp_path, 3)
    file = tmp_path / "checkpoints" / "epoch-0003" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.warns(DamagedCheckpointWarning, match="epoch-0003: weights.safetensors has"):
        train(settings=settings, output=tmp_path, resume="auto")
    assert_same(weights(tmp_path, 3), expected)
    assert len(read_log(tmp_path)) == 3


@pytest.mark.parametrize("text", ["", "a: [", "7", "optim: {epochs: many}"])
@pytest.mark.filterwarnings("ignore:.*config.yaml")
def test_a_broken_config_does_not_block_a_resume(tiny: Tiny, tmp_path: Path, text: str) -> None:
    """0.1.0 refused: `config.yaml holds no settings`, though all checkpoints were whole."""
    train(settings=tiny(optim={"epochs": 1}), output=tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"other settings: optim\.lr is"):
        train(settings=tiny(optim={"epochs": 2, "lr": 0.5}), output=tmp_path, resume="auto")
    again = train(settings=tiny(optim={"epochs": 2}), output=tmp_path, resume="auto")
    assert len(again.history) == 2
    assert read_settings(tmp_path / "config.yaml", TrainSettings()).optim.epochs == 2


def test_a_state_that_does_not_fit_is_one_sentence(tiny: Tiny, tmp_path: Path) -> None:
    """0.1.0 ended in KeyError."""
    train(settings=tiny(optim={"epochs": 1}), output=tmp_path)
    found = Checkpoints(tmp_path / "checkpoints").latest()
    assert found is not None
    Checkpoints(tmp_path / "checkpoints").save(
        epoch=1,
        tensors={"weights": found.weights()},
        state={"updates": 4},
        score=found.score,
        history=found.history,
    )
    with pytest.raises(ValueError, match=r"epoch-0001 does not fit this run"):
        train(settings=tiny(optim={"epochs": 2}), output=tmp_path, resume="auto")


@pytest.mark.parametrize("name", ["log.csv", "tensorboard", "epoch-0002", "model", "curves.png"])
def test_a_full_disk_is_one_sentence(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """0.1.0 gave tracebacks: of a thread of TensorBoard's, and safetensors' own error."""
    real = io.open
    real_mkstemp = tempfile.mkstemp
    started: list[bool] = []

    def full(path: Any) -> None:
        done = (tmp_path / "checkpoints" / "epoch-0001").is_dir()
        parts = str(path).removeprefix(str(tmp_path))
        if done and (name in parts or name.replace("epoch", "unfinished") in parts):
            started.append(True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "a" in mode or "w" in mode:
            full(path)
        return real(path, mode, *rest, **more)

    def temporary(*rest: Any, **more: Any) -> Any:
        full(Path(more["dir"]) / more["prefix"])
        return real_mkstemp(*rest, **more)

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(tempfile, "mkstemp", temporary)
    with pytest.raises(OutOfSpaceError, match=r"no space left .* is the last good one") as caught:
        train(settings=tiny(optim={"epochs": 2}), output=tmp_path)
    assert started
    assert "\n" not in str(caught.value)


def test_accumulated_batches_are_one_larger_batch(tiny: Tiny, tmp_path: Path) -> None:
    common: dict[str, Any] = {"augment": {"scale": [1, 1], "ratio": [1, 1], "hflip": 0}}
    common["merge"] = {"noise": 0.0}
    # 48 images in batches of 12, three at a time: the last update of an epoch has one batch.
    split = tiny(**common, optim={"epochs": 1, "accumulate": 2, "clip": 1.0})
    whole = tiny(**common, optim={"epochs": 1, "clip": 1.0}, data={"batch_size": 24})
    first = train(settings=split, output=tmp_path / "split")
    second = train(settings=whole, output=tmp_path / "whole")
    assert first.metrics["loss"] == pytest.approx(second.metrics["loss"], abs=1e-5)
    theirs = weights(tmp_path / "whole", 1)
    for name, value in weights(tmp_path / "split", 1).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_loss_of_nan_stops_and_names_the_site(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    settings = tiny(optim={"epochs": 3})
    train_epoch = Trainer.run_epoch

    def poisoned(self: Trainer, number: int) -> Any:
        if number == epoch:
            merger = dict(mergers(self.model))["blocks.2.merger"]
            merger.sequence.register_forward_hook(lambda *args: args[2] * torch.nan)  # type: ignore[union-attr]
        return train_epoch(self, number)

    monkeypatch.setattr(Trainer, "run_epoch", poisoned)
    with pytest.raises(NonFiniteLossError, match=r"blocks\.2\.merger.* \(at the site of block 2\)"):
        train(settings=settings, output=tmp_path)
    last = Checkpoints(tmp_path / "checkpoints").latest()
    assert (0 if last is None else last.epoch) == epoch


def test_weights_that_are_not_finite_are_named(tiny: Tiny) -> None:
    model = build(tiny(), 3).model
    images = torch.randn(2, 3, 32, 32)
    assert "gradients are finite" in find_non_finite(model, images)
    assert "images themselves" in find_non_finite(model, images * torch.inf)
    model.get_parameter("blocks.1.mlp.fc1.weight").data[0, 0] = torch.inf
    found = find_non_finite(model, images)
    name = "blocks.1.mlp.fc1.weight (at the site of block 1)"
    assert found == f"the weights {name} are not finite"


def test_a_new_label_set_gets_a_new_head(tiny: Tiny, tmp_path: Path) -> None:
    base = tiny(
        optim={"epochs": 1}, merge={"method": "none", "method_options": []}, data={"batch_size": 24}
    )
    train(settings=base, output=tmp_path / "base")
    changes: dict[str, Any] = {
        "data": {"source": "shapes:classes=5,size=32,images=30,val_images=10", "batch_size": 10},
        "model": {"weights": str(tmp_path / "base" / "model")},
        "tune": {"trainable": "mergers"},
        "optim": {"epochs": 1},
    }
    shown: list[str] = []
    moved = train(settings=tiny(**changes), output=tmp_path / "moved", say=shown.append)
    assert "the head is new, for 5 classes, and trains" in shown
    assert any(line.startswith("epoch 1/1") and "images/s" in line for line in shown)
    trains = {name for name, p in moved.model.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} < trains
    body = weights(tmp_path / "base", 1)
    for name, value in weights(tmp_path / "moved", 1).items():
        if not name.startswith("head") and ".merger." not in name:
            assert value.equal(body[name])
    assert moved.metrics["num_classes"] == 5
    # A token-merging model goes over to other classes too, its class statistics start anew.
    again = tiny(
        **changes
        | {
            "model": {"weights": str(tmp_path / "moved")},  # the run's own folder does too
            "data": {"source": "shapes:classes=4,size=32,images=20,val_images=8", "batch_size": 10},
        }
    )
    model = build(again, 4).model
    assert {merger.site.num_classes for _, merger in mergers(model)} == {4}
    assert not any(merger.active for _, merger in mergers(model))
    assert conversion_of(model).config.name == "ltm"


def test_a_saved_network_keeps_its_schedule_unless_told(tiny: Tiny, tmp_path: Path) -> None:
    model = build(tiny(), 3).model
    counts = ltm.token_counts(model)
    ltm.save(model, tmp_path)

    def again(**merge: Any) -> nn.Module:
        merge = {"method_options": [], **merge}
        return build(tiny(model={"weights": str(tmp_path)}, merge=merge), 3).model

    assert all(recipe.merge.ratio is None for recipe in (*FINETUNE.values(), *SCRATCH.values()))
    assert ltm.token_counts(again()) == counts
    other = again(ratio=0.95)
    assert ltm.token_counts(other) != counts
    assert conversion_of(other).config.ratio == 0.95
    with pytest.raises(ValueError, match=r"per_block=None, not 0\.8; start from the original"):
        again(per_block=0.8)


def test_warm_up_epochs_train_the_original(tiny: Tiny, tmp_path: Path) -> None:
    plain = tiny(optim={"epochs": 1}, merge={"method": "none", "method_options": []})
    train(settings=plain, output=tmp_path / "plain")
    expected = weights(tmp_path / "plain", 1)
    warm = tiny(optim={"epochs": 1}, merge={"warm_epochs": 1})
    # Building the mask modules draws no random numbers, so both start alike.
    result = train(settings=warm, output=tmp_path / "warm")
    assert_same(
        {n: v for n, v in weights(tmp_path / "warm", 1).items() if ".merger." not in n}, expected
    )
    with merging_off(result.model):
        assert top1(result.model, warm) == pytest.approx(result.metrics["top1"])


def test_averaged_weights_share_their_running_statistics_too(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[nn.Module] = []
    monkeypatch.setattr(
        "ltm.training.trainer.average_running_statistics_", lambda model, _: shared.append(model)
    )
    settings = tiny(optim={"epochs": 1, "ema": 0.9}, merge={"method": "none", "method_options": []})
    kept = train(settings=settings, output=tmp_path).model
    assert [model is kept for model in shared] == [False, True]


@pytest.mark.slow
def test_thresholds_are_set_and_measured_on_images_of_all_classes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, colour, number in product(("train", "val"), ("red", "lime", "blue"), range(8)):
        path = tmp_path / split / colour / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), colour).save(path)
    seen: list[torch.Tensor] = []

    def note(_: nn.Module, images: torch.Tensor, **__: Any) -> float:
        seen.append(images.mean((2, 3)).argmax(1))
        return 0.9

    for name in ("fit_", "measure_share"):
        monkeypatch.setattr(f"ltm.training.classification.{name}", note)
    monkeypatch.setattr("ltm.training.classification.FITTING_IMAGES", 6)
    settings = tiny(
        merge={"method": "ltmp", "ratio": 0.9, "method_options": []},
        data={"source": str(tmp_path)},
        optim={"epochs": 1},
    )
    train(settings=settings, output=tmp_path / "run")
    assert [channels.bincount().tolist() for channels in seen] == [[2, 2, 2]] * 2
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["label_names"] == ["blue", "lime", "red"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"model": {"weights": "nowhere.safetensors"}},
            "nowhere.safetensors: there is no such",
        ),
        ({"model": {"weights": "{here}/damaged.safetensors"}}, "cannot be read"),
        ({"model": {"weights": "{here}/other"}}, "do not fit this model"),
        ({"model": {"model_args": ["img_sise=32"]}}, "does not take these arguments"),
        ({"model": {"num_classes": 7}}, "num_classes is 7, but shapes:.* has 3 classes"),
        ({"merge": {"method_options": ["suport=learned"]}}, "ltm has no setting suport"),
        ({"run": {"precision": "16"}}, "precision is 16, which needs a GPU"),
        ({"run": {"device": "cuda"}}, "device is cuda, but this machine has none"),
        ({"data": {"batch_size": 400}}, "do not fill a batch of 400"),
    ],
)
def test_what_cannot_train_is_refused_at_the_door(
    tiny: Tiny, tmp_path: Path, groups: dict[str, Any], message: str
) -> None:
    if torch.cuda.is_available() and "GPU" in message + str(groups.get("run", {})).upper():
        pytest.skip("this machine has a GPU")
    (tmp_path / "damaged.safetensors").write_bytes(b"not weights")
    save_model(nn.Linear(2, 2), tmp_path / "other")
    if "weights" in groups.get("model", {}):
        path = groups["model"]["weights"].format(here=tmp_path)
        groups = {"model": {"weights": path}}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(settings=tiny(**groups), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
