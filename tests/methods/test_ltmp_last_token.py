"""LTMP never leaves an image without tokens, whatever its thresholds say."""

import pytest
import timm
import torch

import ltm
from ltm.api import watching


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilevit_xxs", "efficientvit_b0"])
@pytest.mark.parametrize("thresholds", [(1.1, 2.0), (-1.1, 2.0)])
def test_one_token_is_always_left(name: str, thresholds: tuple[float, float]) -> None:
    merge, prune = thresholds
    model = timm.create_model(name, num_classes=3).eval()
    config = ltm.LTMP(ratio=0.9, merge_threshold=merge, prune_threshold=prune)
    ltm.merge_tokens_(model, config, 64)
    with torch.no_grad(), watching(model) as records:
        assert model(torch.randn(2, 3, 64, 64)).isfinite().all()
    merging = [record for record in records if record.decision is not None]
    assert merging
    for record in merging:
        assert record.size is not None
        assert (record.size > 0).any(dim=1).all()
