"""`ltm train` and `ltm finetune`: from words to a run, and what they refuse."""

import json
from pathlib import Path

import pytest

from ltm.cli import main
from ltm.cli.train import starting_point
from ltm.training.recipes import FINETUNE, SCRATCH
from ltm.training.settings import TrainSettings, read_settings

VIT = ("img_size=32", "patch_size=8", "embed_dim=16", "depth=3", "num_heads=2")
TINY = [
    *("--model", "vit_tiny_patch16_224", "--model-args", *VIT, "--image-size", "32"),
    *("--data", "shapes:classes=3,size=32,images=36,val_images=12", "--batch-size", "12"),
    *("--workers", "0", "--device", "cpu", "--statistics-images", "24"),
]


@pytest.mark.slow
def test_from_scratch_then_fine_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    options = ["--method", "none", "--epochs", "1", "--output", str(base)]
    assert main(["train", *TINY, "--augment.mixup", "0", "--augment.cutmix", "0", *options]) == 0
    options = ["--method", "ltmp", "--method-options", "sites=[1,2]", "--ratio", "0.9"]
    options += ["--weights", str(base / "model"), "--output", str(tuned), "--epochs", "1"]
    assert main(["finetune", *TINY, *options]) == 0
    text = capsys.readouterr().out
    assert "ltmp on vit: 2 of 3 blocks merge" in text
    assert "epoch 1/1  loss" in text
    assert "\r" not in text  # no bar where there is no terminal
    assert "\x1b" not in text
    metrics = json.loads((tuned / "metrics.json").read_text())
    assert metrics["mac_share"] == pytest.approx(0.9, abs=0.05)
    settings = read_settings(tuned / "config.yaml", TrainSettings())
    assert settings.tune.trainable == "mergers"
    assert settings.merge.method == "ltmp"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--model", "vit_smal_patch16_224"],
            "vit_smal_patch16_224 is not known to timm; did you",
        ),
        (["--recipe", "swin_tinny"], "no recipe is named swin_tinny: did you mean swin_tiny"),
        (
            ["--config", "nowhere.yaml"],
            "settings are to come from nowhere.yaml: there is no such file",
        ),
        (["--data", "{here}/absent"], "no data at"),
        (["--data", "{here}/flowers"], "has class folders without images: tulip"),
        (["--num-classes", "5"], "num_classes is 5, but shapes"),
        (["--output", __file__], "a file: a folder is needed"),
        (["--epochs", "0"], "epochs is 0, but must be at least 1"),
        (["--weights", "none.pth"], "none.pth: there is no such file"),
        (["--ratio", "0.01"], "ratio: got 0.01"),
        (["--method", "tome", "--ratio", "0.9"], "nothing would train"),
        (["--method", "foo"], "merge.method is 'foo'; choose from ltm, ltmp"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    for name in ("rose", "tulip"):
        (tmp_path / "flowers" / name).mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "flowers" / "rose" / "a.png")
    options = [option.format(here=tmp_path) for option in options]
    output = ["--output", str(tmp_path / "run")]
    assert main(["finetune", "--device", "cpu", *output, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("ltm finetune: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("options", [["--epoch", "3"], ["--lr", "fast"]])
def test_a_wrong_call_exits_with_2(options: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", *options])
    assert stop.value.code == 2


def test_defaults_follow_the_recipe_the_file_and_the_model(tmp_path: Path) -> None:
    assert starting_point([], SCRATCH) == SCRATCH["shapes_vit"]
    assert starting_point(["--recipe", "swin_base"], FINETUNE) == FINETUNE["swin_base"]
    assert starting_point(["--model", "vit_small_patch16_224"], SCRATCH) == SCRATCH["vit_small"]
    other = starting_point(["--model", "deit_tiny_patch16_224"], SCRATCH)
    assert other == SCRATCH["general"]
    file = tmp_path / "mine.yaml"
    file.write_text("optim: {epochs: 11}")
    mixed = starting_point(["--recipe=vit_base", f"--config={file}"], SCRATCH)
    assert mixed.optim.epochs == 11
    assert mixed.model.name == "vit_base_patch16_224"
    peer = starting_point(["--recipe", "shapes_vit", "--method", "ltmp"], SCRATCH)
    assert peer.merge.method_options == ()  # they were LTM's
