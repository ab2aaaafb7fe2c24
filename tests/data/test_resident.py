"""Images that stay on the device give the batches that other loaders give."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from ltm.data import resident
from ltm.data.classification import open_dataset
from ltm.data.config import AugmentConfig, DataConfig
from ltm.data.loading import evaluation_loader, training_loader
from ltm.data.resident import all_pixels, random_crops, resampling
from ltm.data.transforms import ImageSpec
from ltm.data.writing import write_shards

SOURCE = "shapes:classes=4,size=40,images=24,val_images=10"
LEVEL = 1 / (255 * 0.225)  # one of 256 levels, normalised


def _config(**changes):
    return DataConfig(source=SOURCE, batch_size=8, workers=0, resident=True, **changes)


def _spec(side=32, **changes):
    return ImageSpec(**{"size": (side, side), **changes})


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("crop", [1.0, 0.8])
def test_evaluation_sees_the_same_images(interpolation, size, crop):
    spec = _spec(size, interpolation=interpolation, crop_ratio=crop)
    images = open_dataset(SOURCE)
    ours = list(evaluation_loader(images, spec, _config()))
    theirs = list(evaluation_loader(images, spec, DataConfig(batch_size=8, workers=0)))
    assert [len(batch.labels) for batch in ours] == [8, 2]
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.labels, other.labels)
        apart = (mine.images - other.images) / LEVEL
        assert apart.abs().max() < 2.1  # Pillow's own arithmetic is in integers
        assert apart.mean().abs() < 0.01
        assert apart.abs().mean() < 0.02


def test_mixed_precision_around_it_changes_nothing():
    images = open_dataset(SOURCE)
    plain = next(iter(evaluation_loader(images, _spec(64), _config()))).images
    with torch.autocast("cpu", torch.bfloat16):
        mixed = next(iter(evaluation_loader(images, _spec(64), _config()))).images
    assert torch.equal(plain, mixed)


def test_views_take_their_own_images():
    images = open_dataset(SOURCE, split="train")
    every = torch.cat([b.images for b in evaluation_loader(images, _spec(), _config())])
    few = torch.cat([b.images for b in evaluation_loader(images.take(5), _spec(), _config())])
    assert torch.equal(few, every[:5])


def test_pixels_are_not_pickled():
    images = open_dataset(SOURCE, split="train")
    all_pixels(images, torch.device("cpu"))
    assert images.kept
    assert not pickle.loads(pickle.dumps(images)).kept


@pytest.mark.parametrize("filter_", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("start", "length", "num_out"), [(3, 20, 31), (0, 40, 17), (39, 1, 5)])
def test_a_crop_is_resized_as_pillow_does_it(filter_, start, length, num_out):
    pixels = np.random.default_rng(0).integers(0, 256, (1, 40), dtype=np.uint8)
    resample = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    crop = Image.fromarray(pixels[:, start : start + length])
    expected = np.asarray(crop.resize((num_out, 1), resample[filter_]))[0]
    weights = resampling(
        torch.tensor([float(start)]), torch.tensor([float(length)]), num_out, 40, filter_
    )
    found = (weights[0] @ torch.from_numpy(pixels[0]).float()).round().clamp(0, 255)
    assert np.abs(found.numpy() - expected).max() <= 1


def test_an_epoch_repeats_itself_and_differs_from_the_next():
    loader = training_loader(
        open_dataset(SOURCE, split="train"), _spec(), _config(), AugmentConfig.light(), seed=3
    )
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append(torch.cat([batch.images for batch in loader]))
    assert len(loader) == 3
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])


def test_without_augmentation_training_sees_what_evaluation_sees():
    images = open_dataset(SOURCE, split="train")
    loader = training_loader(images, _spec(), _config(), AugmentConfig.none())
    [first, *_] = list(loader)
    every = torch.cat([b.images for b in evaluation_loader(images, _spec(), _config())])
    distance = (first.images[:, None] - every[None]).flatten(2).abs().amax(dim=2)
    assert (distance.min(dim=1).values < 1e-5).all()


def test_crops_lie_within_images_and_cover_what_was_asked_for():
    augment = AugmentConfig(scale=(0.3, 0.6), ratio=(0.5, 2.0))
    generator = torch.Generator().manual_seed(0)
    top, left, height, width = random_crops(500, (40, 60), augment, generator)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 40).all()
    assert (left + width <= 60).all()
    share = height * width / 2400
    assert 0.27 < share.min() < 0.33
    assert 0.57 < share.max() < 0.63
    assert share.std() > 0.05


def test_a_crop_that_never_fits_is_the_middle():
    augment = AugmentConfig(scale=(1.0, 1.0), ratio=(3.0, 4.0))
    generator = torch.Generator().manual_seed(0)
    top, left, height, width = random_crops(3, (30, 30), augment, generator)
    assert (torch.stack([top, left, height, width]) == torch.tensor([10, 0, 10, 30])[:, None]).all()


def test_flips_are_as_frequent_as_asked_for():
    images = open_dataset(SOURCE, split="train")
    straight, mirrored = (
        training_loader(
            images,
            _spec(40, crop_ratio=1.0),
            _config(),
            AugmentConfig(
                scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=flip, color_jitter=0.0,
                auto_augment=None, erase=0.0,
            ),
        )
        for flip in (1e-9, 1.0)
    )  # fmt: skip
    for mine, other in zip(straight, mirrored, strict=True):
        assert torch.equal(mine.images, other.images.flip(3))


def test_images_are_decoded_once_for_all_views(monkeypatch):
    images = open_dataset(SOURCE, split="train")
    device = torch.device("cpu")
    whole = all_pixels(images, device)
    monkeypatch.setattr(type(images), "__getitem__", None)
    assert all_pixels(images.take(5), device) is whole
    assert all_pixels(images.with_transform(print), device) is whole


def test_worker_processes_decode_the_same_pixels_and_tell_of_broken_files(tmp_path, monkeypatch):
    for number in range(6):
        pixels = np.full((8, 8, 3), 40 * number, dtype=np.uint8)
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "a" / f"{number}.png")
    (tmp_path / "a" / "2.png").write_bytes(b"no image")
    device, found = torch.device("cpu"), []
    for many in (1000, 1):
        monkeypatch.setattr(resident, "_MANY", many)
        with pytest.warns(UserWarning, match=r"2\.png"):
            found.append(all_pixels(open_dataset(tmp_path), device).images)
    assert torch.equal(*found)


def test_images_of_several_sizes_are_refused(tmp_path):
    for number, size in enumerate((8, 9)):
        folder = tmp_path / "a"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (size, 8)).save(folder / f"{number}.png")
    with pytest.raises(ValueError, match=r"differ in size: .*0\.png is 8x8, .*1\.png is 9x8"):
        evaluation_loader(open_dataset(tmp_path), _spec(), _config())


@pytest.mark.parametrize(
    ("augment", "spec", "said"),
    [
        (AugmentConfig(), {}, "color_jitter is 0.4"),
        (AugmentConfig.light(), {"interpolation": "nearest"}, "resized by nearest"),
        (AugmentConfig.light(), {"crop_mode": "border"}, "cropped by border"),
        (AugmentConfig.light(), {"size": (32, 48)}, "only square images"),
    ],
)
def test_what_only_other_loaders_can_do_is_refused(augment, spec, said):
    with pytest.raises(ValueError, match=said):
        training_loader(open_dataset(SOURCE), _spec(**spec), _config(), augment)


def test_shards_are_refused(tmp_path):
    write_shards(open_dataset(SOURCE), tmp_path)
    with pytest.raises(ValueError, match="tar shards are read in sequence"):
        evaluation_loader(open_dataset(tmp_path), _spec(), _config())
