import numpy as np
import pytest
import torch

from ltm.data.scenes import (
    class_names,
    draw_scene,
    paint,
)
from ltm.data.shapes import (
    ShapesClassification,
    ShapesDetection,
    example_pictures,
    shapes_options,
)
from ltm.data.targets import boxes_of


def pixels(dataset: ShapesClassification, index: int) -> np.ndarray:
    return np.asarray(dataset[index][0])


def test_a_picture_depends_on_seed_split_and_index_alone():
    one, other = (ShapesClassification("val", 20, 32) for _ in range(2))
    backwards = {index: pixels(other, index) for index in reversed(range(20))}
    assert all((pixels(one, index) == backwards[index]).all() for index in range(20))
    for changed in (
        ShapesClassification("train", 20, 32),
        ShapesClassification("val", 20, 32, seed=1),
    ):
        assert (pixels(changed, 0) != pixels(one, 0)).mean() > 0.5
    assert (pixels(one, 0) != pixels(one, 10)).mean() > 0.5


def test_loader_processes_paint_the_same_pictures():
    def whole(image):
        return torch.from_numpy(np.array(image))

    dataset = ShapesClassification("train", 8, 32, transform=whole)
    loaded = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1)
    batches = torch.cat([images for images, _ in loaded])
    assert torch.equal(batches, torch.stack([dataset[index][0] for index in range(8)]))


def test_labels_are_balanced_and_known_beforehand():
    dataset = ShapesClassification(num_images=23, image_size=16, num_classes=5)
    assert [dataset[index][1] for index in range(23)] == dataset.labels.tolist()
    assert np.bincount(dataset.labels).tolist() == [5, 5, 5, 4, 4]
    assert len(dataset.take(7)) == 7
    assert dataset.take(7).labels.tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_a_transformed_view_shares_what_was_painted():
    dataset = ShapesClassification(num_images=4, image_size=16)
    shrunk = dataset.with_transform(lambda image: image.size)
    assert shrunk[1] == ((16, 16), 1)
    assert dataset.transform is None
    assert shrunk.files is dataset.files


def test_large_data_sets_are_not_kept_in_memory():
    assert ShapesClassification(num_images=100_000, image_size=224).files._kept is None


@pytest.mark.parametrize("size", [8, 33, 64, 160])
def test_any_size_shows_the_same_scene(size):
    scene = draw_scene(np.random.default_rng(5), (2,), (0.3, 0.3))
    image, masks = paint(scene, size)
    assert image.shape == (3, size, size)
    assert image.dtype == np.uint8
    item = scene.objects[0]
    # A cross of radius r: two bars of 1.9 r by 0.6 r, less their common middle.
    expected = (2 * 1.9 * 0.6 - 0.6**2) * item.radius**2
    assert masks.mean() == pytest.approx(expected, abs=0.6 * item.radius / size + 0.01)


def test_the_object_is_a_minor_and_bright_part():
    for index in range(40):
        rng = np.random.default_rng([1, index])
        image, masks = paint(draw_scene(rng, (index % 5,), (0.22, 0.36)), 64)
        assert 0.02 < masks.mean() < 0.4
        assert image[:, masks[0]].mean() > image[:, ~masks[0]].mean() + 30


def test_every_class_has_its_own_appearance():
    assert len(set(class_names(20))) == 20
    seen = set()
    for label in range(20):
        scene = draw_scene(np.random.default_rng(0), (label,), (0.36, 0.36))
        seen.add(paint(scene, 48).image.tobytes())
    assert len(seen) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "testing"}, "choose from train, val, test"),
        ({"num_classes": 21}, "2 to 20 classes"),
        ({"num_classes": 1}, "2 to 20 classes"),
        ({"num_images": 0}, "num_images is 0"),
        ({"image_size": 0}, "image_size is 0"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShapesClassification(**arguments)


def test_detection_targets_describe_what_is_visible(scenes):
    counts = []
    for index in range(len(scenes)):
        image, target = scenes[index]
        counts.append(len(target["labels"]))
        assert image.shape == (3, 64, 64)
        assert target["boxes"].shape == (counts[-1], 4)
        assert target["masks"].shape == (counts[-1], 64, 64)
        assert target["masks"].sum(0).max() <= 1 or counts[-1] == 0  # nothing is seen twice
        assert torch.equal(target["area"], target["masks"].sum((1, 2)).float())
        assert ((target["labels"] >= 1) & (target["labels"] <= 5)).all()
        for box, mask in zip(target["boxes"].int().tolist(), target["masks"], strict=True):
            left, top, right, bottom = box
            assert mask[top:bottom, left:right].sum() == mask.sum()
            assert mask[top].any()
            assert mask[bottom - 1].any()
            assert mask[:, left].any()
            assert mask[:, right - 1].any()
    assert 0 in counts
    assert max(counts) > 1


def test_detection_is_deterministic_and_checked():
    first, again = (ShapesDetection(num_images=3, image_size=32)[2] for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1]["masks"], again[1]["masks"])
    with pytest.raises(IndexError):
        ShapesDetection(num_images=3)[3]
    with pytest.raises(ValueError, match="empty_ratio is 1"):
        ShapesDetection(empty_ratio=1.0)


def test_boxes_of_masks():
    masks = torch.zeros(2, 6, 9, dtype=torch.uint8)
    masks[0, 2:5, 3:8] = 1
    masks[1, 5, 8] = 1
    assert boxes_of(masks).tolist() == [[3, 2, 8, 5], [8, 5, 9, 6]]
    assert boxes_of(masks[:0]).shape == (0, 4)


def test_example_pictures_are_named_and_large():
    pictures = example_pictures(4, 96)
    assert [picture.image.size for picture in pictures] == [(96, 96)] * 4
    assert all(picture.name for picture in pictures)
    assert len({picture.image.tobytes() for picture in pictures}) == 4
    assert pictures[2].image.tobytes() == example_pictures(3, 96)[2].image.tobytes()


def test_options_in_a_source():
    assert shapes_options("shapes:size=32", {"size": 64, "seed": 0}) == {"size": 32, "seed": 0}
    for wrong in ("shapes:colour=3", "shapes:size=big", "shapes:size"):
        with pytest.raises(ValueError, match="write shapes:size=64"):
            shapes_options(wrong, {"size": 64})


@pytest.mark.slow
def test_a_linear_classifier_cannot_tell_the_classes():
    train = ShapesClassification("train", 600, 32)
    val = ShapesClassification("val", 300, 32)

    def flat(dataset):
        values = [np.asarray(image, dtype=np.float32).ravel() / 255 for image, _ in dataset]
        return np.stack([np.append(value, 1.0) for value in values])

    x, y = flat(train), np.eye(10)[train.labels]
    kernel = x @ x.T + 10.0 * np.eye(len(x))
    scores = flat(val) @ x.T @ np.linalg.solve(kernel, y)
    assert (scores.argmax(1) == val.labels).mean() < 0.45
