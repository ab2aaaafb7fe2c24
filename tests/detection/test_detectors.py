"""SSDLite and Mask R-CNN: any image, any target, in training and in evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ltm.detection.mask_rcnn import MaskRCNN, MaskRCNNConfig, StridedAnchors, strided_pool
from ltm.detection.pyramid import build_pyramid, clean_target, float_image
from ltm.detection.ssdlite import SSDLite, SSDLiteConfig
from ltm.methods import LTM

pytestmark = pytest.mark.slow

MERGING = LTM(per_block=0.5)
QUICK = {
    "rpn_post_nms_top_n_train": 50,
    "rpn_post_nms_top_n_test": 20,
    "box_score_thresh": 0.0,
    "box_batch_size_per_image": 16,
    "box_detections_per_img": 10,
}


def ssdlite(merging: LTM | None = None, **settings: Any) -> SSDLite:
    torch.manual_seed(0)
    settings = {"backbone": "mobilevit_xxs", "image_size": (96, 64), **settings}
    return SSDLiteConfig(num_classes=3, merging=merging, **settings).build()


def mask_rcnn(merging: LTM | None = None, backbone: str = "efficientvit_b0") -> MaskRCNN:
    torch.manual_seed(0)
    pyramid = build_pyramid(backbone, image_size=(64, 96), merging=merging)
    return MaskRCNN(pyramid, 3, (64, 96), width=32, **QUICK)


MAKERS = {
    "ssdlite": ssdlite,
    "ssdlite_ltm": lambda: ssdlite(MERGING),
    "ssdlite_ltm_as_is": lambda: ssdlite(MERGING, restore=False),
    "mask_rcnn": mask_rcnn,
    "mask_rcnn_ltm": lambda: mask_rcnn(MERGING),
    "mask_rcnn_msra": lambda: mask_rcnn(backbone="efficientvit_m0"),
}


def batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Odd sizes and aspects; a plain image, one without objects, one with every fault."""
    torch.manual_seed(0)
    sizes = [(70, 101), (33, 47), (120, 40)]
    images = [torch.rand(3, *size) for size in sizes]
    images[1] = (255 * images[1]).to(torch.uint8)
    boxes = [
        [[5.0, 6.0, 50.0, 60.0], [20.0, 10.0, 90.0, 40.0]],
        [],
        [
            [-20.0, -5.0, 30.0, 50.0],  # leaves the image
            [100.0, 10.0, 140.0, 20.0],  # is wholly outside
            [10.0, 10.0, 10.0, 40.0],  # has no width
            [30.0, 90.0, 20.0, 80.0],  # runs backwards
            [0.0, 0.0, 40.0, 120.0],  # is a crowd
        ],
    ]
    targets = []
    for found, (height, width) in zip(boxes, sizes, strict=True):
        count = len(found)
        masks = torch.zeros(count, height, width, dtype=torch.uint8)
        masks[:, 10:30, 10:30] = 1
        crowd = torch.tensor([int(place == 4) for place in range(count)], dtype=torch.int64)
        targets.append(
            {
                "boxes": torch.tensor(found).reshape(-1, 4),
                "labels": torch.arange(count) % 3 + 1,
                "masks": masks,
                "iscrowd": crowd,
                "image_id": torch.tensor(count),
            }
        )
    return images, targets


@pytest.mark.parametrize("name", MAKERS)
def test_trains_on_any_images_and_targets(name: str) -> None:
    model = MAKERS[name]().train()
    images, targets = batch()
    before = targets[2]["boxes"].clone()
    losses = model(images, targets)
    assert all(loss.isfinite() for loss in losses.values())
    torch.stack(list(losses.values())).sum().backward()
    unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    # Learned supports that keep every token of an axis have nothing to learn.
    assert not [n for n in unused if "merger" not in n]
    assert torch.equal(targets[2]["boxes"], before)


@pytest.mark.parametrize("name", MAKERS)
def test_trains_on_a_batch_without_any_object(name: str) -> None:
    model = MAKERS[name]().train()
    images, targets = batch()
    losses = model(images[1:2] * 2, targets[1:2] * 2)
    assert all(loss.isfinite() for loss in losses.values())
    torch.stack(list(losses.values())).sum().backward()


@pytest.mark.parametrize("name", MAKERS)
def test_finds_boxes_inside_the_image(name: str) -> None:
    model = MAKERS[name]().eval()
    images, _ = batch()
    with torch.no_grad():
        found = model(images)
    assert len(found) == len(images)
    for image, prediction in zip(images, found, strict=True):
        height, width = image.shape[-2:]
        boxes = prediction["boxes"]
        assert len(boxes) > 0
        assert (boxes >= 0).all()
        assert (boxes[:, 0::2] <= width + 1e-3).all()
        assert (boxes[:, 1::2] <= height + 1e-3).all()
        assert set(prediction["labels"].tolist()) <= {1, 2, 3}
        if "masks" in prediction:
            assert prediction["masks"].shape[1:] == (1, height, width)


def test_ssdlite_does_not_depend_on_batch_mates() -> None:
    model = ssdlite(MERGING).eval()
    images, _ = batch()
    with torch.no_grad():
        together, alone = model(images)[0], model(images[:1])[0]
    assert torch.allclose(together["scores"], alone["scores"], atol=1e-5)


@pytest.mark.parametrize("name", ["ssdlite", "ssdlite_ltm", "mask_rcnn_ltm"])
def test_boxes_are_in_full_precision_under_autocast(name: str) -> None:
    images, targets = batch()
    model = MAKERS[name]().train()
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(images, targets)
        maps = model.backbone(torch.rand(2, 3, 64, 64))
    torch.stack(list(losses.values())).sum().backward()
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    assert all(feature.dtype == torch.float32 for feature in maps.values())


def test_ssdlite_has_the_six_levels_of_the_paper() -> None:
    model = SSDLiteConfig(backbone="mobilenetv3_small_050").build().eval()
    maps = model.backbone(torch.rand(1, 3, 320, 320))
    assert [feature.shape[-1] for feature in maps.values()] == [20, 10, 5, 3, 2, 1]
    with torch.no_grad():
        out = model.head(list(maps.values()))
    assert out["cls_logits"].shape == (1, 6 * (400 + 100 + 25 + 9 + 4 + 1), 81)


def test_a_network_that_begins_coarse_gets_finer_maps() -> None:
    model = mask_rcnn(backbone="efficientvit_m0")
    assert model.backbone.strides == (8, 16, 32, 64)
    assert mask_rcnn().backbone.strides == (4, 8, 16, 32)
    assert mask_rcnn(backbone="mobilevit_xxs").backbone.strides == (4, 8, 16, 32)


def test_anchors_stand_on_their_strides() -> None:
    from torchvision.models.detection.image_list import ImageList

    anchors = StridedAnchors((16, 64), 4)
    images = ImageList(torch.rand(1, 3, 96, 96), [(96, 96)])
    found = anchors(images, [torch.rand(1, 8, 6, 6), torch.rand(1, 8, 2, 2)])[0]
    centres = (found[:, :2] + found[:, 2:]) / 2
    assert centres.max() == 5 * 16
    assert centres[-1].tolist() == [64, 64]


def test_regions_are_cut_at_the_stride_whatever_the_aspect() -> None:
    # From 13 rows, padded to 32, torchvision's own concludes that 8 rows are of stride 2.
    feature = torch.arange(84.0).expand(1, 1, 8, 84)
    region = torch.tensor([[160.0, 0.0, 168.0, 8.0]])
    pooled = strided_pool((4,), 1)({"0": feature}, [region], [(13, 333)])
    assert pooled.item() == pytest.approx(41)


def test_targets_are_cleaned() -> None:
    _, targets = batch()
    cleaned = clean_target(targets[2], (120, 40))
    assert cleaned["boxes"].tolist() == [[0, 0, 30, 50]]
    assert cleaned["labels"].tolist() == [1]
    assert cleaned["masks"].shape == (1, 120, 40)
    empty = clean_target(targets[1], (33, 47))
    assert empty["boxes"].shape == (0, 4)
    assert float_image(torch.full((3, 2, 2), 255, dtype=torch.uint8)).max() == 1


def test_what_cannot_be_is_refused() -> None:
    pyramid = build_pyramid("mobilevit_xxs", (16, 32), image_size=(64, 64), restore=False)
    with pytest.raises(ValueError, match="restore: got False"):
        MaskRCNN(pyramid, 3)
    with pytest.raises(ValueError, match="width: got 40"):
        MaskRCNN(build_pyramid("efficientvit_m0", image_size=(64, 64)), 3, width=40)
    with pytest.raises(ValueError, match="num_classes is 0, but must be at least 1"):
        SSDLite(pyramid, 0)
    images, targets = batch()
    with pytest.raises(ValueError, match="needs two to train"):
        SSDLite(pyramid, 3).train()(images[:1], targets[:1])
    with pytest.raises(ValueError, match="num_classes is 0, but must be at least 1"):
        MaskRCNNConfig(backbone="mobilevit_xxs", num_classes=0, image_size=(64, 64)).build()
