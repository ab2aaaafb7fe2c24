"""`ltm.export` and `ltm.predict` from Python: their settings and results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import ltm
import within
from ltm.data.shapes import example_pictures
from many import save_network

DATA = "shapes:classes=10,size=48,val_images=20"


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_network_is_exported_and_its_file_predicts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", img_size=48, **arguments).eval()
    settings = ltm.ExportSettings(method="tome", ratio=0.9, data=DATA)
    result = ltm.export(model, tmp_path, settings, batch_sizes=(1, 2))
    assert not hasattr(model.blocks[0], "merger"), "the network itself stays as it is"
    (file,) = result.files
    assert [row.batch_size for row in file.parity] == [1, 2]
    assert "model.onnx" in repr(result)
    result.save()
    stored = json.loads((tmp_path / "metrics.json").read_text())
    assert stored["token_merging"]["method"] == "tome"
    assert stored["files"][0]["name"] == "model.onnx"

    example_pictures(1, 48)[0].image.save(tmp_path / "picture.png")
    found = ltm.predict(tmp_path / "model.onnx", tmp_path / "picture.png", top=2)
    assert "picture.png" in repr(found)
    (row,) = found
    assert row.answer is not None
    assert len(row.answer["classes"]) == 2
    path = found.save(tmp_path / "out", "csv")
    assert path.read_text().startswith("path,error,class")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["images"] == 1


@pytest.mark.usefixtures("unchecked_shapes")
def test_int8_is_measured_on_a_flat_folder_by_agreement(tmp_path: Path) -> None:
    arguments = {"patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 7}
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, **arguments).eval()
    for index, example in enumerate(example_pictures(4, 32)):
        (tmp_path / "flat").mkdir(exist_ok=True)
        example.image.save(tmp_path / "flat" / f"{index}.png")
    few = {"batch_sizes": (1,), "int8": ("dynamic",)}
    with pytest.raises(ValueError, match="int8 needs images of the network's own kind; give"):
        ltm.export(model, tmp_path / "out", **few)
    with pytest.raises(ValueError, match="needs images that set ranges, but 4 images are too few"):
        ltm.export(model, tmp_path / "out", data=str(tmp_path / "flat"), int8=("small",))
    assert not (tmp_path / "out").exists(), "refused before anything is traced"
    result = ltm.export(model, tmp_path / "out", data=str(tmp_path / "flat"), **few)
    (row,) = result.int8
    assert (row.labelled, row.top1_before, row.num_images) == (False, 1.0, 4)
    assert "agreement before" in repr(result)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"formats": ()}, "formats: there is none"),
        ({"formats": ("aoti",), "int8": ("accurate",)}, "but formats is aoti; add onnx or program"),
        ({"ratio": 0.5}, "--ratio goes with --method"),
        ({"format": "onnx"}, "format is no setting; did you mean formats"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ltm.export("nowhere", "nowhere", **changes)
    with pytest.raises(ValueError, match="at least 1"):
        ltm.PredictSettings(top=0)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("data", "crop"), [({}, 0.9), ({"data": DATA}, 1.0)])
def test_shapes_that_stand_in_for_images_leave_the_crop_as_the_network_has_it(
    data: dict[str, str], crop: float, tmp_path: Path
) -> None:
    arguments = {"patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, **arguments).eval()
    result = ltm.export(model, tmp_path, batch_sizes=(1,), **data)
    assert result.information.spec.crop_ratio == crop


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["program", "onnx"])
def test_a_full_disk_is_one_sentence(kind: str, tmp_path: Path) -> None:
    """torch ends the process if there is no space for a program that it writes itself."""
    call = ["export", "--run", str(save_network(tmp_path / "run")), "--formats", kind]
    disk = tmp_path / "out"
    words = [*within.a_disk(disk, "32k"), sys.executable, "-m", "ltm", *call, "--output", str(disk)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("ltm export: no space left")
    assert done.stderr.count("\n") == 1
