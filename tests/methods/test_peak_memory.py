"""Merging takes no memory that grows with the square of the tokens."""

import itertools

import pytest
import timm
import torch
from torch.profiler import ProfilerActivity, profile

import ltm

SIZE, PATCH = 256, 4  # 4,096 tokens: 64 MB for all pairs in single precision
SCHEDULE = {"sites": (0, 1), "counts": (3000, 2000)}
CONVERSIONS = {
    "LTM": ltm.LTM(**SCHEDULE),
    "LTM, two sides": ltm.LTM(**SCHEDULE, support=ltm.Matched(matching="alternate")),
    "ToMe": ltm.ToMe(**SCHEDULE),
    "ToMe, more than a side": ltm.ToMe(sites=(0,), counts=(1500,)),
}


def _network(config=None):
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=64, depth=2, num_heads=1, num_classes=10
    )
    if config is not None:
        ltm.merge_tokens_(model, config, SIZE)
    return model


def _peak(model, *, training):
    """Bytes that torch holds at the most, beside the weights."""
    images = torch.randn(1, 3, SIZE, SIZE)
    model.train(training)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
        torch.set_grad_enabled(training),
    ):
        out = model(images)
        if training:
            out.sum().backward()
    events = profiled.profiler.kineto_results.events()
    found = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in found))


@pytest.fixture(scope="module")
def original():
    return {training: _peak(_network(), training=training) for training in (False, True)}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_network_needs_no_more_memory_than_the_original(name, training, original):
    assert 0 < _peak(_network(CONVERSIONS[name]), training=training) <= original[training]
