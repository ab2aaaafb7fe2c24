"""What detectors cost, and that merging makes them cheaper."""

import pytest
import torch
from torch import nn

from ltm.detection.mask_rcnn import MaskRCNNConfig
from ltm.detection.score import detector_cost
from ltm.detection.ssdlite import SSDLiteConfig
from ltm.methods import LTM


def test_parts_add_up_and_nothing_is_run() -> None:
    model = SSDLiteConfig(backbone="mobilevit_xxs", num_classes=3, image_size=(64, 96)).build()
    before = torch.get_rng_state()
    cost = detector_cost(model)
    assert cost.macs == sum(cost.parts.values())
    assert cost.num_parameters == sum(p.numel() for p in model.parameters())
    assert cost.image_size == (64, 96)
    assert "GMACs at 64 x 96" in str(cost)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training


@pytest.mark.slow
def test_mask_rcnn_counts_a_thousand_proposals() -> None:
    model = MaskRCNNConfig(backbone="efficientvit_b0", num_classes=3, image_size=(64, 90)).build()
    cost = detector_cost(model)
    assert cost.image_size == (64, 96)
    # Two layers and the predictor, a thousand times.
    boxes = 1000 * (256 * 49 * 1024 + 1024 * 1024 + 1024 * 4 * 5)
    assert cost.parts["boxes"] == boxes
    assert "1000 proposals" in cost.note


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ["mobilevit_xs", "mobilevit_s", "efficientvit_b1"])
def test_merging_saves_what_the_paper_saves(name: str) -> None:
    original = detector_cost(SSDLiteConfig(backbone=name).build())
    merging = detector_cost(SSDLiteConfig(backbone=name, merging=LTM(ratio=0.7)).build())
    assert merging.macs <= 0.88 * original.macs
    assert merging.num_parameters == pytest.approx(original.num_parameters, rel=0.01)


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="got Linear; SSDLite or MaskRCNN"):
        detector_cost(nn.Linear(1, 1))
