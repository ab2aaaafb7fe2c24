"""Networks as pyramids: the promised channels and strides, whatever the image."""

from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import ltm
from ltm.api import merging_network
from ltm.detection.pyramid import Pyramid, build_pyramid, size_arguments
from ltm.methods import LTM, Learned, ToMe

pytestmark = pytest.mark.slow

FAMILIES = {
    "mobilevit_xxs": 64,
    "efficientvit_b0": 64,
    "swin_tiny_patch4_window7_224": 112,
    "vit_tiny_patch16_224": 64,
}
OTHERS = (
    "efficientvit_m0",
    "mobilenetv3_small_050",
    "resnet10t",
    "deit_tiny_distilled_patch16_224",
)
MERGING = LTM(per_block=0.5)


def grids(maps: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(feature.shape[-2:]) for feature in maps]


def check(pyramid: Pyramid, size: tuple[int, int]) -> None:
    with torch.no_grad():
        maps = pyramid.eval()(torch.rand(2, 3, *size))
    assert [feature.shape[1] for feature in maps] == list(pyramid.channels)
    nominal = [tuple(-(-side // stride) for side in size) for stride in pyramid.strides]
    assert grids(maps) == nominal
    assert all(feature.isfinite().all() for feature in maps)


SWIN = pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow)


@pytest.mark.parametrize("merging", [None, MERGING], ids=["original", "ltm"])
@pytest.mark.parametrize("name", [SWIN if "swin" in name else name for name in FAMILIES])
def test_any_size_and_aspect(name: str, merging: LTM | None) -> None:
    side = FAMILIES[name]
    strides = (4, 8, 16, 32)
    pyramid = build_pyramid(name, strides, image_size=(side, side), merging=merging)
    assert pyramid.strides == strides
    assert (merging_network(pyramid) is None) == (merging is None)
    for size in ((side, side), (side - 11, side // 2 + 5), (33, side + 40)):
        check(pyramid, size)


@pytest.mark.parametrize("name", OTHERS)
def test_any_timm_network(name: str) -> None:
    pyramid = build_pyramid(name, image_size=(64, 64))
    for size in ((64, 64), (51, 38)):
        check(pyramid, size)


def test_maps_as_merging_leaves_them_are_smaller() -> None:
    images = torch.rand(1, 3, 64, 64)
    learned = LTM(per_block=0.5, support=Learned())
    for name in ("mobilevit_xxs", "efficientvit_b0"):
        pyramid = build_pyramid(
            name, (16, 32), image_size=(64, 64), merging=learned, restore=False
        ).eval()
        shrunk = grids(pyramid(images))
        pyramid.restore = True
        whole = grids(pyramid(images))
        assert whole == [(4, 4), (2, 2)]
        assert shrunk < whole
    # A method that keeps no grid restores it itself, and so does LTM on MobileViT unless told.
    open_ = LTM(per_block=0.5)
    whole = build_pyramid("mobilevit_xxs", (16, 32), image_size=(64, 64), merging=open_).eval()
    whole.restore = False
    assert grids(whole(images)) == [(4, 4), (2, 2)]
    kept = build_pyramid(
        "efficientvit_b0", (16, 32), image_size=(64, 64), merging=ToMe(per_block=0.8), restore=False
    ).eval()
    assert grids(kept(images)) == [(4, 4), (2, 2)]


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("name", ["mobilevit_xxs", "efficientvit_b0"])
def test_a_converted_classifier_gives_the_maps_of_features_only(name: str, restore: bool) -> None:
    torch.manual_seed(0)
    whole = timm.create_model(name, num_classes=5)
    torch.manual_seed(0)
    features = timm.create_model(name, num_classes=5, features_only=True, out_indices=(-2, -1))
    for model in (whole, features):
        ltm.merge_tokens_(model, MERGING, image_size=64)
    images = torch.rand(1, 3, 64, 50)
    from_whole = Pyramid(whole, (16, 32), restore=restore).eval()
    from_features = Pyramid(features, (16, 32), restore=restore).eval()
    assert from_whole.channels == from_features.channels
    assert merging_network(from_whole) is not None
    for one, other in zip(from_whole(images), from_features(images), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_folder_of_a_converted_model_is_a_backbone(tmp_path: Path) -> None:
    model = timm.create_model("efficientvit_b0", num_classes=3)
    ltm.merge_tokens_(model, MERGING, image_size=64)
    ltm.save(model.eval(), tmp_path)
    images = torch.rand(1, 3, 64, 64)
    expected = cast("Any", model).forward_intermediates(images, intermediates_only=True)
    found = build_pyramid(str(tmp_path), (16, 32), image_size=(64, 64)).eval()(images)
    assert torch.allclose(found[-1], expected[-1], atol=1e-5)
    with pytest.raises(ValueError, match="has its own merging"):
        build_pyramid(str(tmp_path), image_size=(64, 64), merging=MERGING)


def test_a_file_of_weights_is_loaded_and_its_average_is_named(tmp_path: Path) -> None:
    torch.manual_seed(1)
    donor = timm.create_model("mobilevit_xxs").eval()
    path = tmp_path / "weights.pth"
    raw = {name: torch.zeros_like(value) for name, value in donor.state_dict().items()}
    torch.save({"state_dict": raw, "state_dict_ema": donor.state_dict()}, path)
    said: list[str] = []
    pyramid = build_pyramid(
        "mobilevit_xxs", (32,), image_size=(64, 64), weights=str(path), say=said.append
    ).eval()
    assert "entry state_dict_ema of weights.pth" in said[0]
    images = torch.rand(1, 3, 64, 64)
    assert torch.allclose(
        pyramid(images)[0], cast("Any", donor).forward_features(images), atol=1e-5
    )
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        build_pyramid("mobilevit_xxs", image_size=(64, 64), weights=str(tmp_path / "none.pth"))


@pytest.mark.real
def test_real_weights_of_a_vit_are_loaded(real_data: Path) -> None:
    file = real_data / "vit_tiny_patch16_224.fp16.safetensors"
    if not file.is_file():
        pytest.skip(f"no real data: {file.name} is absent")
    whole: Any = timm.create_model("vit_tiny_patch16_224").eval()
    whole.load_state_dict({name: value.float() for name, value in load_file(file).items()})
    pyramid = build_pyramid(
        "vit_tiny_patch16_224", (16, 32), image_size=(224, 224), weights=str(file)
    ).eval()
    images = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        expected = whole.forward_intermediates(images, indices=1, intermediates_only=True)[0]
        found = pyramid.network(images)[-1]
    assert torch.allclose(found, expected, atol=1e-3)


def test_a_converted_classifier_keeps_its_class_statistics() -> None:
    model = timm.create_model("efficientvit_b0", num_classes=3)
    ltm.merge_tokens_(model, MERGING, image_size=64)
    loader = [(torch.rand(6, 3, 64, 64), torch.arange(6) % 3)] * 2
    ltm.collect_statistics_(model, loader)
    before = [value.clone() for name, value in model.named_buffers() if "centroids" in name]
    pyramid = Pyramid(model, (16, 32))
    after = [value for name, value in pyramid.named_buffers() if "centroids" in name]
    assert before
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert not [name for name, _ in pyramid.named_parameters() if ".head." in name]


def test_all_weights_of_a_pyramid_are_used() -> None:
    names = ("mobilevit_xxs", "efficientvit_b0", "efficientvit_m0", "vit_tiny_patch16_224")
    made = [build_pyramid(name, (16, 32), image_size=(64, 64)) for name in names]
    whole = ("efficientvit_b0", "mobilenetv3_small_050")
    made += [Pyramid(timm.create_model(name), (16, 32)) for name in whole]
    for name, pyramid in zip(names + whole, made, strict=True):
        pyramid.train()
        maps = pyramid(torch.rand(2, 3, 64, 64))
        torch.stack([feature.mean() for feature in maps]).sum().backward()
        unused = [n for n, p in pyramid.named_parameters() if p.requires_grad and p.grad is None]
        assert not unused, (name, unused)


def test_networks_of_one_size_pad_up_to_it_and_refuse_more() -> None:
    assert size_arguments("efficientvit_m0", (50, 70)) == ({"img_size": 96}, (96, 96))
    pyramid = build_pyramid("efficientvit_m0", image_size=(50, 70)).eval()
    check(pyramid, (50, 96))
    with pytest.raises(ValueError, match="takes at most 96 x 96"):
        pyramid(torch.rand(1, 3, 97, 10))


def test_normalisation_is_the_network_s_own() -> None:
    assert build_pyramid("mobilevit_xxs", image_size=(64, 64)).normalisation == (
        [0.0] * 3,
        [1.0] * 3,
    )
    assert Pyramid(timm.create_model("resnet10t")).normalisation[0][0] == pytest.approx(0.485)


@pytest.mark.parametrize(
    ("name", "strides", "message"),
    [
        (
            "efficientvit_b9",
            None,
            "b9 is not known to timm; did you mean.*efficientvit_b",
        ),
        ("efficientvit_m0", (8,), "strides: got 8; this network has 16, 32, 64"),
        ("vit_tiny_patch16_224", (64,), "strides: got 64; this network has 4, 8, 16, 32"),
    ],
)
def test_what_cannot_be_is_refused(name: str, strides: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_pyramid(name, strides, image_size=(64, 64))


def test_a_network_without_maps_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no feature maps"):
        Pyramid(nn.Linear(2, 2))
