from types import SimpleNamespace

import pytest
import torch

from ltm.data.loading import build_loader
from ltm.data.sampling import TrainingSampler
from ltm.data.shapes import ShapesClassification
from ltm.data.slots import OrderSampler, SlotFiller, Slots, shutil
from ltm.data.transforms import ImageSpec, evaluation_transform

SPEC = ImageSpec(size=(24, 24), crop_ratio=1.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shapes():
    made = ShapesClassification("train", num_images=22, image_size=24)
    return made.with_transform(evaluation_transform(SPEC))


def test_a_batch_is_what_its_draws_say(shapes):
    slots, order = Slots(2, 4, (24, 24), CPU), TrainingSampler(shapes)
    filler = SlotFiller(shapes, slots)
    for asked in OrderSampler(order, 4, len(slots)):
        assert filler.__getitems__(asked) == asked.slot
        images, labels = next(slots.read([asked.slot]))
        expected = [shapes[draw.index] for draw in asked.draws]
        assert torch.equal(images, torch.stack([image for image, _ in expected]))
        assert labels.tolist() == [label for _, label in expected]


def test_slots_take_turns_from_epoch_to_epoch(shapes):
    order = OrderSampler(TrainingSampler(shapes), 4, 6)
    assert len(order) == 5
    turns = [asked.slot for _ in range(3) for asked in order]
    assert turns == [turn % 6 for turn in range(15)]


def test_labels_outlive_their_slot():
    slots = Slots(1, 2, (4, 4), CPU)
    slots.labels.fill_(7)
    labels = next(slots.read([0]))[1]
    slots.labels.fill_(3)
    assert labels.tolist() == [7, 7]


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (lambda shapes: [("no image", 0)] * 4, TypeError, "images are str; give the data set"),
        (lambda shapes: [(torch.rand(3, 24, 24), 0)] * 4, TypeError, "would be normalised"),
        (
            lambda shapes: [(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * 4,
            ValueError,
            r"an image of \(3, 8, 8\) is not the \(3, 24, 24\)",
        ),
        (
            lambda shapes: [(torch.zeros(3, 24, 24, dtype=torch.uint8), 0.5)] * 4,
            TypeError,
            "a label is 0.5; training needs the index of a class",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(shapes, dataset, error, message):
    loader = build_loader(dataset(shapes), batch_size=2, workers=1, training=True, spec=SPEC)
    with pytest.raises(error, match=message):
        next(iter(loader))


def test_too_little_shared_memory_is_said_beforehand(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(ValueError, match=r"8 batches for workers take 5 MiB .* 1 are free"):
        Slots(4, 350, (24, 24), CPU)
