"""Distillation and tuning: no labels, what is kept is never worse, a time becomes epochs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import ltm
from ltm.api import unmerged_copy
from ltm.compression.settings import CompressSettings
from ltm.data.datasets import open_dataset
from ltm.models import create_model
from ltm.training.distillation import set_aside
from ltm.training.settings import Length
from ltm.training.trainable import has_lora
from ltm.training.tuning import tune_

QUICK: dict[str, Any] = {"batch_size": 16, "workers": 0, "device": "cpu"}


def network(ratio: float = 0.6) -> nn.Module:
    """A network whose outputs differ from image to image, and change a lot when tokens merge."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=5,
        img_size=32,
        patch_size=4,
        embed_dim=24,
        depth=3,
        num_heads=3,
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    ltm.merge_tokens_(model, ltm.LTM(ratio=ratio))
    return model


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in one folder, without classes."""
    folder = tmp_path_factory.mktemp("flat")
    pixels = np.random.default_rng(0).integers(0, 255, (60, 4, 4, 3), dtype=np.uint8)
    for index, small in enumerate(pixels):
        Image.fromarray(small).resize((32, 32), Image.Resampling.BICUBIC).save(
            folder / f"{index}.png"
        )
    return folder


def outputs(model: nn.Module) -> torch.Tensor:
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(images)


def test_lengths_are_times_or_epochs() -> None:
    assert Length.read("60s") == Length(seconds=60)
    assert Length.read(" 1.5 m") == Length(seconds=90)
    assert Length.read("2h") == Length(seconds=7200)
    assert str(Length.read("3 epochs")) == "3 epochs"
    assert str(Length.read("1epoch")) == "1 epoch"
    for text in ("60", "s", "0s", "1.5 epochs", "-3s", "ten minutes"):
        with pytest.raises(ValueError, match=r"tune: got .*; give a time or epochs"):
            Length.read(text)


def test_images_set_aside_teach_nothing(flat: Path) -> None:
    train, held_out = set_aside(open_dataset(flat, labelled=False))
    assert (len(train), len(held_out)) == (48, 12)
    assert not set(train.indices) & set(held_out.indices)
    with pytest.raises(ValueError, match="images to tune on"):
        set_aside(train.take(39))


def test_unlabelled_images_bring_a_network_closer_to_its_original(flat: Path) -> None:
    model = network()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    result = tune_(model, open_dataset(flat, labelled=False), "3 epochs", **QUICK)
    found = result.metrics
    assert found["kept"] == "tuned"
    assert found["divergence"] < found["divergence_untrained"]
    assert (found["num_images"], found["num_held_out"]) == (48, 12)
    moved = {n for n, v in result.model.state_dict().items() if not v.equal(kept[n])}
    assert moved
    assert all("norm" in name or ".merger." in name for name in moved)


def test_tuning_that_harms_is_undone(flat: Path) -> None:
    model = network()
    before = outputs(model)
    said: list[str] = []
    images = open_dataset(flat, labelled=False)
    result = tune_(model, images, "1 epoch", lr=10.0, clip=0.0, say=said.append, **QUICK)
    assert result.metrics["kept"] == "untrained"
    assert result.metrics["divergence"] == result.metrics["divergence_untrained"]
    assert outputs(result.model).equal(before)
    assert "the untrained network is kept" in said[-1]


def test_a_time_becomes_epochs_of_as_many_images(
    flat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ltm.training.tuning._images_in", lambda *_: 192)
    monkeypatch.setattr("ltm.training.tuning._EPOCHS", 2)
    result = tune_(network(), open_dataset(flat, labelled=False), "2s", **QUICK)
    assert result.metrics["length"] == "2 s"
    assert result.metrics["num_images"] == 48
    assert len(result.rows) == 2
    assert all(
        row.images_per_second * row.train_seconds == pytest.approx(96) for row in result.rows
    )


@pytest.mark.parametrize("trainable", ["lora", pytest.param("mergers", marks=pytest.mark.slow)])
def test_the_same_from_finetune_resumed(trainable: str, flat: Path, tmp_path: Path) -> None:
    recipe = f"distil_{trainable}"

    def run(epochs: int, resume: Any = "never") -> ltm.TrainResult:
        return ltm.finetune(
            network(), flat, recipe, output=tmp_path / "run", epochs=epochs, resume=resume,
            ratio=0.6, **QUICK
        )  # fmt: skip

    run(1)
    result = run(2, resume="auto")
    assert [row.epoch for row in result.rows] == [1, 2]
    assert not has_lora(result.model)
    loaded = ltm.load(tmp_path / "run" / "model", unmerged_copy(network()))
    torch.testing.assert_close(outputs(loaded), outputs(result.model))


def test_unlabelled_images_say_nothing_of_the_head(flat: Path, tmp_path: Path) -> None:
    small = {"num_classes": 5, "img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 3}
    model = create_model("vit_tiny_patch16_224", small)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.6))
    ltm.save(model, tmp_path)
    said: list[str] = []
    result = ltm.finetune(
        tmp_path, flat, "distil_norms", num_classes=5, epochs=1, say=said.append, **QUICK
    )
    assert outputs(result.model).shape == (8, 5)
    assert not any("head" in line for line in said)


def test_compress_tells_what_tuning_needs() -> None:
    with pytest.raises(ValueError, match="tune: got 'long'"):
        CompressSettings(tune="long")
    with pytest.raises(ValueError, match="give one of them"):
        CompressSettings(tune="60s", finetune_epochs=1)
    with pytest.raises(ValueError, match="say how long to tune"):
        CompressSettings(tune_data="images")
    with pytest.raises(ValueError, match="trainable: got 'head'; choose from mergers"):
        CompressSettings(tune="60s", trainable="head")


QUICK_COMPRESS: dict[str, Any] = {
    "bottleneck_images": 0, "pictures": "generated", "workers": 0, "device": "cpu",
}  # fmt: skip
SMALL_SHAPES = "shapes:classes=5,size=32,images=60,val_images=20"


@pytest.mark.slow
def test_compress_keeps_what_lora_has_tuned(tmp_path: Path) -> None:
    result = ltm.compress(
        unmerged_copy(network()), SMALL_SHAPES, ratio=0.6, calibrate=False, tune="2 epochs",
        trainable="lora", time=False, batch_size=16, **QUICK_COMPRESS,
    )  # fmt: skip
    assert result.model is not None
    assert not has_lora(result.model)
    loaded = ltm.load(result.save(tmp_path / "small"), unmerged_copy(network()))
    torch.testing.assert_close(outputs(loaded), outputs(result.model))


@pytest.mark.slow
def test_a_network_of_a_chosen_ratio_can_be_tuned() -> None:
    result = ltm.compress(
        unmerged_copy(network()), SMALL_SHAPES, method="ltm:support=learned", ratios=(0.7,),
        calibrate=False, tune="1 epoch", trainable="mergers", time_rounds=1, time_batches=(1,),
        forms=("eager",), batch_size=16, **QUICK_COMPRESS,
    )  # fmt: skip
    assert result.comparison.tuning is not None
    assert result.comparison.tuning["model"] == "vit_tiny_patch16_224"


@pytest.mark.slow
def test_images_to_evaluate_are_not_tuned_on(tmp_path: Path) -> None:
    for place in range(10):
        path = tmp_path / f"000{place % 5}" / f"{place}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (32, 32)).save(path)
    for given in (None, str(tmp_path)):
        with pytest.raises(ValueError, match="has no training split, and its images are evaluated"):
            ltm.compress(unmerged_copy(network()), str(tmp_path), tune="1 epoch", tune_data=given)


@pytest.mark.slow
def test_compress_tunes_and_says_so(flat: Path) -> None:
    model = unmerged_copy(network())
    for tune_data in (None, SMALL_SHAPES, str(flat)):
        result = ltm.compress(
            model, SMALL_SHAPES, ratio=0.6, calibrate=False, tune="2 epochs", tune_data=tune_data,
            time=False, batch_size=16, **QUICK_COMPRESS,
        )  # fmt: skip
        tuning = result.comparison.tuning
        assert tuning is not None
        assert tuning["divergence"] <= tuning["divergence_untrained"]
        assert "It was tuned (norms) for 2 epochs on 48 images" in repr(result)
