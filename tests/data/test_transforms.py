from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation

from ltm.data.config import AugmentConfig, DataConfig
from ltm.data.sampling import random_numbers_of
from ltm.data.transforms import (
    BatchMixup,
    ImageSpec,
    evaluation_transform,
    image_spec,
    training_transform,
)


@pytest.fixture
def picture():
    values = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.slow
def test_a_models_own_settings():
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    spec = image_spec(DataConfig(source="folder"), model)
    assert spec == ImageSpec(
        size=(224, 224), crop_ratio=0.9, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3
    )
    small = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64)
    assert image_spec(DataConfig(), small).size == (64, 64)
    assert image_spec(DataConfig(), small).crop_ratio == 1.0


def test_what_is_stated_goes_first():
    config = DataConfig(
        source="folder",
        image_size=96,
        crop_ratio=0.8,
        interpolation="bilinear",
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
    )
    spec = image_spec(config, timm.create_model("mobilevit_xxs"))
    assert (spec.size, spec.crop_ratio, spec.interpolation) == ((96, 96), 0.8, "bilinear")
    assert (spec.mean, spec.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert image_spec().size == (224, 224)


def test_evaluation_is_timms(picture):
    spec = ImageSpec(size=(32, 32), crop_ratio=0.9)
    expected = timm.data.create_transform(  # pyright: ignore[reportAttributeAccessIssue]
        (3, 32, 32), crop_pct=0.9, interpolation="bicubic", mean=spec.mean, std=spec.std
    )(picture)
    assert torch.equal(evaluation_transform(spec, normalize=True)(picture), expected)
    pixels = evaluation_transform(spec)(picture)
    assert pixels.dtype == torch.uint8
    mean, std = (torch.tensor(part)[:, None, None] for part in (spec.mean, spec.std))
    assert torch.allclose((pixels / 255 - mean) / std, expected, atol=1e-6)


@pytest.mark.parametrize("augment", [AugmentConfig(erase=1.0), AugmentConfig.light()])
def test_training_varies_images_by_their_random_numbers(picture, augment):
    transform = training_transform(ImageSpec(size=(32, 32)), augment)

    def vary(key):
        with random_numbers_of(key):
            return transform(picture)

    assert vary(1).shape == (3, 32, 32)
    assert vary(1).dtype == torch.uint8
    assert torch.equal(vary(1), vary(1))
    assert not torch.equal(vary(1), vary(2))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_crops_are_resized_as_pillow_does_it(picture, monkeypatch, interpolation, flip):
    place = (3, 5, 20, 30)  # top, left, height, width
    monkeypatch.setattr(RandomResizedCropAndInterpolation, "get_params", lambda *_: place)
    spec = ImageSpec(size=(24, 32), interpolation=interpolation)
    augment = replace(AugmentConfig.light(), hflip=flip)
    found = training_transform(spec, augment)(picture)
    crop = picture.crop((5, 3, 35, 23)).resize((32, 24), getattr(Image, interpolation.upper()))
    expected = np.asarray(crop.transpose(Image.FLIP_LEFT_RIGHT) if flip else crop)
    assert np.abs(found.permute(1, 2, 0).numpy() - expected.astype(int)).max() <= 2


def test_no_augmentation_is_what_evaluation_sees(picture):
    spec = ImageSpec(size=(32, 32))
    transform = training_transform(spec, AugmentConfig.none())
    assert torch.equal(transform(picture), evaluation_transform(spec)(picture))
    assert not AugmentConfig.none().varies
    assert not AugmentConfig.none().mixes
    assert AugmentConfig.light().varies


def test_erasing_puts_noise_into_a_rectangle():
    still = AugmentConfig(**{**vars(AugmentConfig.none()), "erase": 1.0})
    transform = training_transform(ImageSpec(size=(48, 48)), still)
    with random_numbers_of(3):
        erased = transform(Image.new("RGB", (48, 48), (255, 255, 255))) != 255
    rows, columns = erased.any(0).any(1), erased.any(0).any(0)
    share = erased.float().mean()
    assert 0.01 < share < 0.4
    assert share / (rows.float().mean() * columns.float().mean()) > 0.8


def test_mixing_repeats_itself_and_leaves_generators_alone():
    mix = BatchMixup(AugmentConfig(), num_classes=5, seed=1)
    images, labels = torch.rand(8, 3, 16, 16), torch.arange(8) % 5

    def mixed(epoch, step, mix=mix):
        return mix(images.clone(), labels, epoch=epoch, step=step)

    before = str(np.random.get_state())  # noqa: NPY002
    first = mixed(0, 0)
    assert torch.equal(first.images, mixed(0, 0).images)
    assert not torch.equal(first.images, mixed(0, 1).images)
    assert not torch.equal(first.images, mixed(1, 0).images)
    other = BatchMixup(AugmentConfig(), num_classes=5, seed=1, rank=1)
    assert not torch.equal(first.images, mixed(0, 0, other).images)
    assert str(np.random.get_state()) == before  # noqa: NPY002
    assert first.targets.shape == (8, 5)
    assert torch.allclose(first.targets.sum(1), torch.ones(8))


def test_without_mixing_only_labels_are_smoothed():
    mix = BatchMixup(AugmentConfig(mixup=0.0, cutmix=0.0, smoothing=0.2), num_classes=4)
    images = torch.rand(2, 3, 8, 8)
    mixed = mix(images.clone(), torch.tensor([1, 3]), epoch=0, step=0)
    assert torch.equal(mixed.images, images)
    assert torch.allclose(mixed.targets[0], torch.tensor([0.05, 0.85, 0.05, 0.05]))
    with pytest.raises(ValueError, match="batch of 3 cannot be mixed"):
        mix(torch.rand(3, 3, 8, 8), torch.zeros(3), epoch=0, step=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig(batch_size=0), "batch_size is 0, but must be at least 1"),
        (lambda: DataConfig(workers=-1), "workers is -1"),
        (lambda: DataConfig(crop_ratio=1.5), "crop_ratio is 1.5"),
        (lambda: DataConfig(holdout_ratio=1.0), "holdout_ratio is 1.0"),
        (lambda: AugmentConfig(erase=2.0), "erase is 2.0, but must be from 0 to 1"),
        (lambda: AugmentConfig(mixup=-1.0), "mixup is -1.0"),
        (lambda: AugmentConfig(repeats=0), "repeats is 0"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
