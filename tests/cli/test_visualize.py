"""`ltm visualize`: sheets and films of given images, and the numbers in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import ltm
from ltm.api.saving import remember_arguments
from ltm.cli import main
from ltm.data.shapes import example_pictures

NAME = "vit_tiny_patch16_224"
ARGUMENTS: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 3}
WORDS = ["--model", NAME, "--model-args", "img_size=32", "patch_size=4", "embed_dim=24", "depth=3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=4, **ARGUMENTS)
    save_file(model.state_dict(), folder / "weights.safetensors")
    ltm.merge_tokens_(model, ltm.LTM(counts=(50, 30), sites=(1, 2)))
    ltm.save(remember_arguments(model, ARGUMENTS), folder / "run")
    (folder / "images").mkdir()
    for index, picture in enumerate(example_pictures(7, 48)):
        picture.image.save(folder / "images" / f"{index}.png")
    (folder / "vast.pgm").write_bytes(b"P4 16000 15000\n")
    return folder


@pytest.mark.slow
def test_sheets_films_and_numbers(place: Path, tmp_path: Path) -> None:
    options = ["--weights", str(place / "weights.safetensors"), "--sites", "all", "--gif"]
    options += ["--method", "ltm:counts=40+20,sites=1+2", "--against", "tome:per_block=0.8"]
    images = [str(place / "images" / "0.png"), str(place / "images" / "3.png")]
    assert main(["visualize", *images, *WORDS, *options, "--output", str(tmp_path)]) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "film-01.gif",
        "film-02.gif",
        "groups-block-01.png",
        "groups-block-02.png",
        "metrics.json",
        "weights-block-01.png",
        "weights-block-02.png",
    ]
    with Image.open(tmp_path / "weights-block-02.png") as sheet:
        assert sheet.width > 400
    with Image.open(tmp_path / "film-01.gif") as film:
        assert film.n_frames == 4  # pyright: ignore[reportAttributeAccessIssue]
    rows = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))["tokens"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert sum(row["target_weights"]) == pytest.approx(1, abs=1e-4)
        assert len(row["target_weights"]) == row["target_patches"]
    ours = [row["num_tokens"] for row in rows if row["method"].startswith("ltm")]
    assert ours == [40, 40, 20, 20]


@pytest.mark.slow
def test_a_saved_run_is_drawn_as_it_is_and_many_images_fill_sheets(
    place: Path, tmp_path: Path
) -> None:
    options = ["--run", str(place / "run"), "--against", "none", "--targets", "3,4"]
    assert main(["visualize", str(place / "images"), *options, "--output", str(tmp_path)]) == 0
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == [
        "groups-block-01-1.png",
        "groups-block-01-2.png",
        "weights-block-01-1.png",
        "weights-block-01-2.png",
    ]
    rows = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))["tokens"]
    assert [row["num_tokens"] for row in rows] == [50] * 7
    assert all(row["target"] == [3, 4] for row in rows)


BAD = {
    "missing image": (["{place}/none.png"], [], "there is no such image or folder"),
    "no image": (["{place}/weights.safetensors"], [], "is not a readable image"),
    "vast image": (["{place}/vast.pgm"], [], "has 240000000 pixels, but most_pixels is 134217728"),
    "empty folder": (["{place}/run"], [], "holds no images"),
    "wrong target": (["{place}/images"], ["--targets", "a,b"], "write row,column"),
    "far target": (["{place}/images/0.png"], ["--targets", "9,9"], "outside the image"),
    "wrong number": (["{place}/images"], ["--targets", "1,1", "2,2"], "give one, or one for each"),
    "wrong site": (["{place}/images"], ["--sites", "7"], "blocks that merge: 1, 2"),
    "no limit": (["{place}/images"], ["--limit", "0"], "limit is 0, but must be at least 1"),
    "two methods": ([], ["--method", "tome"], "a saved run merges already; leave --method out"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_2(
    case: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, options, sentence = BAD[case]
    images = [text.format(place=place) for text in images]
    words = ["--run", str(place / "run"), "--against", "none", "--output", str(tmp_path / "new")]
    assert main(["visualize", *images, *words, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ltm visualize: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_the_last_block_of_all_is_drawn_only_where_nothing_else_merges() -> None:
    from ltm.report.tracing import last_attended_block

    for sites, counts, block in (((1, 5), (10, 2), 1), ((5,), (2,), 5)):
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6)
        ltm.merge_tokens_(model, ltm.LTM(sites=sites, counts=counts))
        assert last_attended_block(model) == block


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("convnext_tiny", "model: ConvNeXt has no block that can merge tokens"),
        ("coat_tiny", "model: CoaT has no block that can merge tokens"),
        ("vit_tinny", "model vit_tinny is not known to timm; did you mean vit_tiny_patch16_224"),
        ("vit_tiny_patch16_224", "has no weights yet: give --pretrained or --weights FILE"),
    ],
)
def test_what_cannot_merge_is_said_before_weights_are_missed(
    model: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["visualize", "--model", model, "--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
