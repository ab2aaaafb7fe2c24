"""Streams of images: in order, in bounded memory, whatever is among them."""

import io
import json
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ltm.data.shapes import example_pictures
from ltm.data.sources import check_inputs, find_images, path_refs
from ltm.deployment.export import Export
from ltm.deployment.prediction import Classifier, Detector, ImageModel, open_writer, stream
from ltm.deployment.predictor import BatchPredictor
from ltm.deployment.settings import InputSettings

pytestmark = pytest.mark.slow


class Brightness(ImageModel):
    """A model that needs no network."""

    columns: ClassVar[tuple[str, ...]] = ("classes", "values")

    def __init__(self) -> None:
        self.batches: list[int] = []

    def prepare(self, image: Image.Image) -> Tensor:
        return torch.tensor([float(image.getpixel((0, 0))[0])])  # type: ignore[index]

    def answer(self, images: Sequence[Tensor]) -> list[dict[str, Any]]:
        self.batches.append(len(images))
        return [{"classes": [f"{v:.0f}"], "values": [float(v)]} for v in torch.cat(list(images))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for value in range(7):
        image = Image.new("RGB", (4, 4), (value * 10, 0, 0))
        image.save(tmp_path / f"{value}.png")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    Image.new("L", (4, 4), 200).save(tmp_path / "deep" / "er" / "grey.jpg")
    (tmp_path / "notes.md").write_text("no image")
    (tmp_path / ".hidden.png").write_bytes(b"")
    return tmp_path


def paths_of(inputs: list[str]) -> list[str]:
    return [image.path for image in find_images(inputs)]


def test_paths_come_from_images_folders_lists_and_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*(f"{value}.png" for value in range(7)), "deep/er/grey.jpg"]
    assert paths_of([str(folder)]) == [str(folder / name) for name in names]
    assert [image.id for image in find_images([str(folder)])] == names
    listed = folder / "paths.txt"
    listed.write_text("a.png\n\nb c.png\r\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("x.png\ny.png\n"))
    found = paths_of(["one.png", str(listed), "-"])
    assert found == ["one.png", "a.png", "b c.png", "x.png", "y.png"]
    check_inputs(["-", str(folder)])
    with pytest.raises(FileNotFoundError, match=r"absent\.png: there is no such image"):
        check_inputs([str(folder), "absent.png"])


def test_only_shapes_is_generated_not_files_that_begin_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "0.png").rename(folder / "shapes_0.png")
    monkeypatch.chdir(folder)
    assert paths_of(["shapes_0.png"]) == ["shapes_0.png"]
    with pytest.raises(FileNotFoundError, match=r"shapes_1\.png: there is no such image"):
        check_inputs(["shapes_1.png"])


def test_folders_are_sorted_by_path(tmp_path: Path) -> None:
    names = ["b.png", "a/2.png", "0500.png", "a/10.png", "a.png", "0000.png", "c/z/1.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert paths_of([str(tmp_path)]) == [str(p) for p in sorted(tmp_path / n for n in names)]


def test_limits_are_written_behind_an_input(folder: Path) -> None:
    listed = folder / "paths.txt"
    listed.write_text(f"{folder}/0.png\n")
    for name in (f"{folder}/0.png", str(folder), str(listed)):
        inputs = [f"{name}?most_pixels=1"]
        check_inputs(inputs)
        first, *_ = stream(find_images(inputs), Brightness())
        assert first.path == f"{folder}/0.png"
        assert "pixels, but most_pixels is 1;" in (first.error or "")
        assert next(stream(find_images([f"{name}?most_pixels=9999"]), Brightness())).error is None


def test_predictions_keep_the_order_and_report_what_cannot_be_read(folder: Path) -> None:
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n but no more")
    names = ["0.png", "3.png", "broken.png", "absent.png", "1.png", "deep", "6.png"]
    model = Brightness()
    found = list(stream(path_refs(str(folder / n) for n in names), model, batch_size=3))
    assert [Path(row.path).name for row in found] == names
    values = [None if row.answer is None else row.answer["values"][0] for row in found]
    assert values == [0, 30, None, None, 10, None, 60]
    assert "cannot identify" in (found[2].error or "")
    assert found[3].error == "No such file or directory"
    assert found[5].error == "Is a directory"
    assert model.batches == [2, 1, 1]
    assert list(stream([], model)) == []
    with pytest.raises(ValueError, match="must be at least 1"):
        list(stream([], model, batch_size=0))


def test_millions_of_paths_cost_no_memory(folder: Path) -> None:
    path, taken = str(folder / "0.png"), count()

    def endless() -> Iterator[str]:
        for _ in taken:
            yield path

    model = Brightness()
    found = stream(path_refs(endless()), model, batch_size=8, threads=2)
    sizes = []
    tracemalloc.start()
    for _ in range(3):
        for _ in range(800):
            next(found)
        model.batches.clear()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[2] - sizes[1] < 20_000, "a path and its future alone would be 600,000"
    assert next(taken) <= 2400 + 3 * 8, "paths are read only as they are needed"
    assert not [t for t in threading.enumerate() if t.name.startswith("decode")]


def test_a_classifier_names_the_likeliest_classes(exported: Export, tmp_path: Path) -> None:
    example_pictures(1, 64)[0].image.save(tmp_path / "picture.png")
    file, answers = exported.folder / "model.onnx", []
    for model, top in ((file, 3), (exported.model, 3), (file, 50)):
        classifier = Classifier(BatchPredictor(model, "top5", top=top, device="cpu"))
        (row,) = stream(path_refs([str(tmp_path / "picture.png")]), classifier)
        assert row.answer is not None
        answers.append(row.answer)
    assert answers[0]["classes"] == [f"class {index}" for index in answers[0]["indices"]]
    assert answers[0]["probabilities"] == sorted(answers[0]["probabilities"], reverse=True)
    assert answers[1]["classes"] == [str(index) for index in answers[1]["indices"]], "no names"
    assert len(answers[2]["classes"]) == 10
    assert sum(answers[2]["probabilities"]) == pytest.approx(1, abs=1e-4)
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\n")
    with pytest.raises(ValueError, match="got 2 for a model of 10 classes"):
        BatchPredictor(file, "top5", inputs=InputSettings(class_names=few)).load()


def test_arrays_may_be_views(exported: Export) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
    predictor = BatchPredictor(exported.folder / "model.onnx", "logits", device="cpu")
    found, wanted = (predictor({"image": x})["logits"] for x in (frames[..., ::-1], frames))
    copied = predictor({"image": frames[..., ::-1].copy()})["logits"]
    assert (found == copied).all()
    assert (found != wanted).any()


def test_a_detector_gives_boxes_above_its_threshold(folder: Path) -> None:
    class Found:
        class_names = ("cat", "dog")

        @staticmethod
        def model(images: list[Tensor]) -> list[dict[str, Tensor]]:
            assert [tuple(image.shape) for image in images] == [(3, 4, 4), (3, 4, 4)]
            assert float(images[1].max()) == pytest.approx(30 / 255)
            boxes = torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 3.04]])
            scores, labels = torch.tensor([0.3, 0.9]), torch.tensor([1, 2])
            return [{"boxes": boxes, "scores": scores, "labels": labels}] * 2

    detector = Detector(Found(), threshold=0.5)  # type: ignore[arg-type]
    images = path_refs([str(folder / "0.png"), str(folder / "3.png")])
    rows = list(stream(images, detector))
    expected = {"classes": ["dog"], "scores": [0.9], "boxes": [[1.0, 1.0, 3.0, 3.0]]}
    assert [row.answer for row in rows] == [expected, expected]


def test_lines_are_json_or_csv(folder: Path) -> None:
    import csv

    model = Brightness()
    images = path_refs([str(folder / "1.png"), str(folder / "absent, or so.png")])
    rows = list(stream(images, model))
    lines, table = io.StringIO(), io.StringIO()
    for row in rows:
        open_writer("jsonl", lines, model)(row)
    write = open_writer("csv", table, model)
    for row in rows:
        write(row)
    first, second = (json.loads(line) for line in lines.getvalue().splitlines())
    assert first == {"path": str(folder / "1.png"), "classes": ["10"], "values": [10.0]}
    assert second["error"] == "No such file or directory"
    table.seek(0)
    one, other = csv.DictReader(table)
    assert (one["class"], one["error"], json.loads(one["values"])) == ("10", "", [10.0])
    assert (other["path"], other["class"]) == (str(folder / "absent, or so.png"), "")
