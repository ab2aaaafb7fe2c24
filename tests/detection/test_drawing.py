"""Pictures of detections."""

import torch

from ltm.detection.inference import SMALLEST_SIDE, draw_detections

PREDICTION = {
    "boxes": torch.tensor([[2.0, 2.0, 12.0, 9.0], [0.0, 0.0, 5.0, 5.0], [9.0, 9.0, 3.0, 3.0]]),
    "labels": torch.tensor([1, 2, 1]),
    "scores": torch.tensor([0.9, 0.1, 0.8]),
    "masks": torch.zeros(3, 1, 16, 24),
}


def test_what_scores_enough_is_drawn_on_an_enlarged_image() -> None:
    PREDICTION["masks"][0, 0, 4:8, 4:8] = 1
    image = torch.full((3, 16, 24), 0.5)
    drawn = draw_detections(image, PREDICTION, ["cat", "dog"], threshold=0.5)
    assert drawn.dtype == torch.uint8
    assert min(drawn.shape[-2:]) >= SMALLEST_SIDE - 16
    assert drawn.shape[-1] * 16 == drawn.shape[-2] * 24
    assert bool((drawn != 128).any())
    nothing = draw_detections(image, PREDICTION, ["cat", "dog"], threshold=0.95)
    assert bool((nothing == 128).all())


def test_the_truth_and_empty_images_are_drawn_too() -> None:
    image = torch.zeros(3, 400, 500, dtype=torch.uint8)
    truth = {"boxes": torch.tensor([[10.0, 10.0, 100.0, 90.0]]), "labels": torch.tensor([1])}
    drawn = draw_detections(image, truth, ["cat"])
    assert drawn.shape == image.shape
    assert drawn[:, 10, 50].any()
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    assert not draw_detections(image, empty, ["cat"]).any()
