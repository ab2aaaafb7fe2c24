import time

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ltm.data.config import AugmentConfig, DataConfig
from ltm.data.datasets import open_dataset
from ltm.data.images import UnreadableImagesError, UnreadableImageWarning
from ltm.data.loading import (
    Batch,
    Lookahead,
    build_loader,
    evaluation_loader,
    to_device,
    training_loader,
)
from ltm.data.shapes import ShapesClassification
from ltm.data.transforms import ImageSpec, evaluation_transform, image_spec

SPEC = ImageSpec(size=(24, 24), crop_ratio=1.0)


@pytest.fixture(scope="module")
def shapes():
    return ShapesClassification("train", num_images=22, image_size=24)


def epoch_of(loader, epoch):
    loader.set_epoch(epoch)
    return [Batch(images.clone(), labels.clone()) for images, labels in loader]


def same(one, other):
    pairs = [pair for both in zip(one, other, strict=True) for pair in zip(*both, strict=True)]
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def training(dataset, *, workers=0, seed=0, **options):
    config = DataConfig(batch_size=4, workers=workers)
    return training_loader(dataset, SPEC, config, AugmentConfig(), seed=seed, **options)


def test_evaluation_batches_are_the_data_set_in_order(shapes):
    loader = evaluation_loader(shapes, SPEC, DataConfig(batch_size=8, workers=0))
    batches = list(loader)
    assert [len(batch.labels) for batch in batches] == [8, 8, 6]
    assert len(loader) == 3
    expected = [evaluation_transform(SPEC, normalize=True)(shapes[i][0]) for i in range(22)]
    images = torch.cat([batch.images for batch in batches])
    assert torch.allclose(images, torch.stack(expected), atol=1e-5)
    assert torch.cat([batch.labels for batch in batches]).tolist() == shapes.labels.tolist()


def test_training_repeats_exactly_whatever_the_workers(shapes):
    plain, forked = training(shapes), training(shapes, workers=2)
    first, second = epoch_of(plain, 0), epoch_of(plain, 1)
    assert len(first) == len(plain) == 5
    assert same(epoch_of(forked, 0), first)
    assert same(epoch_of(forked, 1), second)  # by the very same worker processes
    assert same(epoch_of(forked, 4), epoch_of(plain, 4))
    assert same(epoch_of(training(shapes), 1), second)  # as after resuming
    assert not same(first, second)
    assert not same(epoch_of(training(shapes, seed=1), 0), first)


def test_loading_leaves_the_global_generators_alone(shapes):
    before = torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    for loader in (training(shapes), training(shapes, workers=1)):
        list(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]  # noqa: NPY002


def test_two_processes_train_on_what_one_would(shapes):
    config = DataConfig(batch_size=8, workers=0)
    whole = epoch_of(training_loader(shapes, SPEC, config, AugmentConfig()), 0)
    halves = [epoch_of(training(shapes, rank=rank, world_size=2), 0) for rank in range(2)]
    for batch, *parts in zip(whole, *halves, strict=True):
        mine, theirs = (part.images for part in parts)
        assert torch.equal(batch.images[0::2], mine)
        assert torch.equal(batch.images[1::2], theirs)


def test_two_processes_evaluate_every_image_once(shapes):
    config = DataConfig(batch_size=4, workers=0)
    sizes = []
    for rank in range(3):
        loader = evaluation_loader(shapes, SPEC, config, rank=rank, world_size=3)
        sizes.append(sum(len(batch.labels) for batch in loader))
    assert sizes == [8, 7, 7]


def test_repeated_augmentation_shows_an_image_in_several_ways(shapes):
    config = DataConfig(batch_size=4, workers=0)
    augment = AugmentConfig(repeats=2, erase=0.0)
    batch = epoch_of(training_loader(shapes, SPEC, config, augment), 0)[0]
    assert batch.labels[0] == batch.labels[1]
    assert not torch.equal(batch.images[0], batch.images[1])


@pytest.mark.parametrize("num_images", [0, 1, 7, 12])
def test_evaluation_neither_drops_nor_doubles(num_images):
    shares = [
        build_loader(range(num_images), batch_size=2, rank=rank, world_size=4, collate=list)  # pyright: ignore[reportArgumentType]
        for rank in range(4)
    ]
    found = [index for share in shares for batch in share for index in batch]
    assert sorted(found) == list(range(num_images))


def test_images_of_the_wrong_type_are_refused(shapes):
    with pytest.raises(TypeError, match="images are Image; give the data set a transform"):
        next(iter(build_loader(shapes, batch_size=2)))
    floats = shapes.with_transform(evaluation_transform(SPEC, normalize=True))
    with pytest.raises(TypeError, match="would be normalised"):
        next(iter(build_loader(floats, batch_size=2, spec=SPEC)))


def test_a_batch_that_cannot_be_filled_is_refused(shapes):
    with pytest.raises(ValueError, match="11 images for each process do not fill a batch of 12"):
        build_loader(shapes, batch_size=12, training=True, world_size=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_load_evenly(shards, workers):
    dataset = open_dataset(shards, split="train")
    config = DataConfig(batch_size=4, workers=workers)
    spec = ImageSpec(size=(32, 32), crop_ratio=1.0)
    loader = evaluation_loader(dataset, spec, config)
    labels = torch.cat([batch.labels for batch in loader])
    assert sorted(labels.tolist()) == sorted(dataset.labels.tolist())
    train = training_loader(dataset, spec, config, AugmentConfig.light())
    first, second, again = (epoch_of(train, epoch) for epoch in (0, 1, 0))
    assert [len(batch.labels) for batch in first] == [4] * len(train) == [4] * 6
    assert same(first, again)
    assert not same(first, second)


def test_shards_repeat_exactly_whatever_the_workers(shards):
    dataset = open_dataset(shards, split="train")
    plain, forked = training(dataset), training(dataset, workers=2)
    assert same(epoch_of(plain, 3), epoch_of(forked, 3))
    halves = [epoch_of(training(dataset, rank=rank, world_size=2), 3) for rank in range(2)]
    both = training_loader(dataset, SPEC, DataConfig(batch_size=8, workers=0), AugmentConfig())
    for batch, *parts in zip(epoch_of(both, 3), *halves, strict=True):
        assert torch.equal(batch.images[0::2], parts[0].images)
        assert torch.equal(batch.images[1::2], parts[1].images)


@pytest.fixture
def damaged(tmp_path):
    """Write eight images of two classes, three of them damaged."""
    for number in range(8):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (24, 24), (number, 0, 0)).save(path)
        if number in (1, 4, 5):
            path.write_bytes(b"no image")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_report_unreadable_images_once(damaged, workers):
    config = DataConfig(batch_size=2, workers=workers)
    loader = evaluation_loader(open_dataset(damaged), SPEC, config)
    with pytest.warns(UnreadableImageWarning) as caught:
        epochs = [torch.cat([batch.images for batch in loader]) for _ in range(2)]
    assert len(epochs[0]) == 8
    assert torch.equal(epochs[0], epochs[1])
    unreadable = [w for w in caught if w.category is UnreadableImageWarning]
    named = sorted(str(warning.message).split(".png")[0][-3:] for warning in unreadable)
    assert named == ["a/4", "b/1", "b/5"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore::ltm.data.images.UnreadableImageWarning")
def test_the_limit_is_one_for_all_workers(damaged, workers):
    dataset = open_dataset(damaged, max_unreadable=2)
    loader = evaluation_loader(dataset, SPEC, DataConfig(batch_size=1, workers=workers))
    with pytest.raises(
        UnreadableImagesError,
        match=r"^3 unreadable images, max_unreadable is 2.* \(the last one: .*not a readable",
    ):
        list(loader)


def test_fetching_ahead_changes_neither_order_nor_number():
    asked = []

    def numbers():
        for number in range(4):
            asked.append(number)
            yield number

    batches = Lookahead(numbers())
    found = []
    for number in batches:
        found.append(number)
        if number != 1:
            batches.fetch()
            batches.fetch()
            assert asked == list(range(min(number + 2, 4)))
    assert found == [0, 1, 2, 3]
    batches.fetch()
    assert not list(batches)


def test_moving_nested_batches():
    batch = Batch(torch.ones(1), torch.ones(1))
    moved = to_device({"a": [torch.ones(2)], "b": (batch, "c")}, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert isinstance(moved["b"][0], Batch)
    assert moved["b"][0].labels.device.type == "meta"
    assert moved["b"][1] == "c"


@pytest.mark.real
@pytest.mark.slow
def test_loading_costs_no_more_than_a_bare_timm_loop(real_data):
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    dataset = open_dataset(real_data / "imagenet-val.zip").take(100)
    spec = image_spec(DataConfig(source="files"), model)
    plain = torch.utils.data.DataLoader(
        dataset.with_transform(evaluation_transform(spec, normalize=True)),  # pyright: ignore[reportArgumentType]
        batch_size=50,
    )
    ours = evaluation_loader(dataset, spec, DataConfig(batch_size=50, workers=0))

    def seconds(loader):
        start = time.process_time()
        for images, _ in loader:
            assert images.shape[1:] == (3, 224, 224)
        return time.process_time() - start

    bare, mine = (min(seconds(loader) for _ in range(2)) for loader in (plain, ours))
    assert mine < bare / 0.9
