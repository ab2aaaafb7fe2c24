"""COCO's averages: equal to pycocotools' on the same detections, and every edge handled."""

import contextlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ltm.data.targets import decode_mask, encode_mask
from ltm.detection.coco import open_detection
from ltm.detection.score import (
    CocoScores,
    coco_results,
    coco_scores,
    detect,
    evaluate_detections,
    write_results,
)

CATEGORIES = (3, 7, 90)


def rectangle(box: list[float], size: tuple[int, int]) -> torch.Tensor:
    x, y, w, h = (round(value) for value in box)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[y : y + h, x : x + w] = True
    return mask


def scene(seed: int = 0, num_images: int = 12) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Annotations and detections: crowds, empty images, misses, doubles, gaps in the ids."""
    rng = np.random.default_rng(seed)
    images, annotations, results = [], [], []
    for index in range(num_images):
        image_id, size = 10 + 3 * index, (int(rng.integers(90, 200)), int(rng.integers(90, 200)))
        images.append(
            {"id": image_id, "height": size[0], "width": size[1], "file_name": f"{index}"}
        )
        count = 0 if index % 4 == 3 else int(rng.integers(1, 6))
        for _ in range(count):
            w, h = rng.integers(12, 80, 2).tolist()
            x, y = int(rng.integers(0, size[1] - 4)), int(rng.integers(0, size[0] - 4))
            box = [x, y, min(w, size[1] - x), min(h, size[0] - y)]
            mask = rectangle(box, size)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": int(rng.choice(CATEGORIES)),
                    "bbox": box,
                    "area": int(mask.sum()),
                    "iscrowd": int(rng.random() < 0.2),
                    "segmentation": encode_mask(mask),
                }
            )
        truths = [item for item in annotations if item["image_id"] == image_id]
        for truth in truths * 2 + annotations[:2]:
            if rng.random() < 0.2:
                continue
            moved = np.array(truth["bbox"], dtype=float) + rng.normal(0, 2, 4)
            moved[:2] = moved[:2].clip(0)
            moved[2:] = moved[2:].clip(2)
            category = truth["category_id"] if rng.random() < 0.8 else int(rng.choice(CATEGORIES))
            results.append(
                {
                    "image_id": image_id,
                    "category_id": category,
                    "bbox": moved.tolist(),
                    "score": float(rng.random()),
                    "segmentation": encode_mask(rectangle(moved.tolist(), size)),
                }
            )
    truth = {
        "info": {},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": str(number)} for number in CATEGORIES],
    }
    return truth, results


def pycocotools_scores(
    truth: dict[str, Any], results: list[dict[str, Any]], kind: str
) -> list[float]:
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    dropped = "bbox" if kind == "segm" else "segmentation"
    results = [{k: v for k, v in item.items() if k != dropped} for item in results]
    with contextlib.redirect_stdout(io.StringIO()):
        api = coco.COCO()
        api.dataset = json.loads(json.dumps(truth))
        api.createIndex()
        run = cocoeval.COCOeval(api, api.loadRes(results), kind)
        run.evaluate()
        run.accumulate()
        run.summarize()
    return [float(value) for value in run.stats[:6]]


def as_list(scores: CocoScores) -> list[float]:
    return [
        scores.ap,
        scores.ap50,
        scores.ap75,
        scores.ap_small,
        scores.ap_medium,
        scores.ap_large,
    ]


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("seed", range(4))
def test_scores_equal_those_of_pycocotools(kind: Any, seed: int) -> None:
    truth, results = scene(seed)
    assert any(item["iscrowd"] for item in truth["annotations"])
    ours = as_list(coco_scores(truth, results, kind))
    assert 0.05 < ours[0] < 0.95
    assert ours == pytest.approx(pycocotools_scores(truth, results, kind), abs=1e-6)


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_only_crowds_and_empty_images_are_nothing_to_find(kind: Any) -> None:
    truth, results = scene()
    for item in truth["annotations"]:
        item["iscrowd"] = 1
    ours = as_list(coco_scores(truth, results, kind))
    assert ours == pytest.approx(pycocotools_scores(truth, results, kind), abs=1e-6)
    assert ours[0] == -1


def test_no_detections_at_all_score_nothing() -> None:
    truth, _ = scene()
    scores = evaluate_detections(truth, [], masks=True)
    assert scores.box.ap == 0
    assert scores.mask is not None
    assert scores.mask.ap50 == 0
    assert asdict(scores)["box"]["ap75"] == 0


def test_the_truth_itself_scores_one_and_is_left_unchanged() -> None:
    truth, _ = scene()
    before = json.dumps(truth)
    wanted = ("image_id", "category_id", "bbox", "segmentation")
    results = [
        {**{name: item[name] for name in wanted}, "score": 0.9}
        for item in truth["annotations"]
        if not item["iscrowd"]
    ]
    scores = evaluate_detections(truth, results, masks=True)
    assert scores.box.ap == pytest.approx(1)
    assert scores.mask is not None
    assert scores.mask.ap == pytest.approx(1)
    assert json.dumps(truth) == before
    assert "id" not in results[0]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_compressed_masks_are_read_back_by_us_and_by_pycocotools() -> None:
    tools = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        mask = torch.from_numpy(rng.random((37, 211)) < share)
        encoded = encode_mask(mask)
        assert (tools.decode(encoded) == mask.numpy()).all()
        assert encoded["counts"] == tools.encode(np.asfortranarray(mask.numpy()))["counts"].decode()
        assert (decode_mask(encoded, 37, 211) == mask.numpy()).all()


def test_probabilities_of_masks_count_from_a_half_on() -> None:
    soft = torch.tensor([[[0.4, 0.5], [0.6, 0.0]]])
    assert decode_mask(encode_mask(soft), 2, 2).tolist() == [[False, True], [True, False]]


def test_results_have_coco_boxes_and_the_file_s_category_ids(tmp_path: Path) -> None:
    prediction = {
        "boxes": torch.tensor([[1.0, 2.0, 11.0, 5.0]]),
        "labels": torch.tensor([3]),
        "scores": torch.tensor([0.25]),
    }
    results = coco_results(17, prediction, CATEGORIES)
    assert results == [
        {"image_id": 17, "category_id": 90, "bbox": [1.0, 2.0, 10.0, 3.0], "score": 0.25}
    ]
    assert json.loads(write_results(tmp_path / "r.json", results).read_text()) == results


class OneBox(nn.Module):
    """Finds one box in every image."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        assert not self.training
        box = {
            "boxes": torch.tensor([[0.0, 0.0, 4.0, 4.0]]),
            "labels": torch.tensor([1]),
            "scores": torch.tensor([0.5]),
        }
        return [box for _ in images]


def test_an_image_that_comes_twice_counts_once() -> None:
    batch = ([torch.rand(3, 8, 8)] * 2, [{"image_id": torch.tensor(4)}] * 2)
    model = OneBox().train()
    assert len(detect(model, [batch], (1,))) == 1
    assert model.training


def test_an_image_that_two_processes_see_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(shares: list[Any], own: Any) -> None:
        shares[:] = [own] * len(shares)

    for name, fake in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda fake=fake: fake)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    batch = ([torch.rand(3, 8, 8)], [{"image_id": torch.tensor(4)}])
    assert len(detect(OneBox(), [batch], (1,))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_id": 999}, "image_id is 999, which no image"),
        ({"segmentation": None}, "some have no segmentation"),
    ],
)
def test_results_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    truth, results = scene()
    changed = {**results[0], **change}
    changed = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        coco_scores(truth, [changed], "segm")


def test_truth_without_masks_has_no_mask_scores() -> None:
    truth, results = scene()
    del truth["annotations"][2]["segmentation"]
    assert coco_scores(truth, results, "bbox").ap > 0
    with pytest.raises(ValueError, match="annotation 3: segmentation is missing"):
        coco_scores(truth, results, "segm")


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_scores_equal_those_of_pycocotools_on_photographs(kind: Any, real_data: Path) -> None:
    archive = real_data / "coco-128.zip"
    if not archive.is_file():
        pytest.skip("no real data: coco-128.zip is absent")
    dataset = open_detection(archive, masks=kind == "segm")
    truth = dataset.coco_dict()
    assert sum(item["iscrowd"] for item in truth["annotations"]) == 13
    rng = np.random.default_rng(0)
    results: list[dict[str, Any]] = []
    for index in range(len(dataset)):
        target = dataset[index][1]
        prediction = {
            "boxes": target["boxes"] + torch.from_numpy(rng.normal(0, 4, target["boxes"].shape)),
            "labels": target["labels"],
            "scores": torch.from_numpy(rng.random(len(target["labels"]))),
        }
        if kind == "segm":
            shift = int(rng.integers(0, 6))
            prediction["masks"] = target["masks"].roll(shift, -1)
        results += coco_results(int(target["image_id"]), prediction, dataset.category_ids)
    ours = as_list(coco_scores(truth, results, kind))
    assert 0.2 < ours[0] < 1
    assert ours == pytest.approx(pycocotools_scores(truth, results, kind), abs=1e-6)
