"""Budgets of the paper's models, counted on `meta` at their true input sizes."""

import math

import pytest
import timm
import torch

import ltm
from ltm.adapters.blocks import TokenState
from ltm.adapters.planning import _MacCounter
from ltm.models import method_config
from toys import pictures, toy

AGAIN = ("mobilevit_xs@224", "mobilevit_s@224", "efficientvit_b1@288", "vit_base", "swin_base")
MODELS = {
    "mobilevit_xs@224": ("mobilevit_xs", 224),
    "mobilevit_xs@256": ("mobilevit_xs", 256),
    "mobilevit_s@224": ("mobilevit_s", 224),
    "mobilevit_s@256": ("mobilevit_s", 256),
    "efficientvit_b1@224": ("efficientvit_b1", 224),
    "efficientvit_b1@288": ("efficientvit_b1", 288),
    "vit_tiny": ("vit_tiny_patch16_224", 224),
    "vit_small": ("vit_small_patch16_224", 224),
    "vit_base": ("vit_base_patch16_224", 224),
    "deit3_small": ("deit3_small_patch16_224", 224),
    "registers": ("vit_small_patch14_reg4_dinov2", 224),
    "swin_tiny": ("swin_tiny_patch4_window7_224", 224),
    "swin_base": ("swin_base_patch4_window7_224", 224),
}
RATIOS = (0.9, 0.7, 0.5)
# What differs from another one in width, depth or size alone.
FEWER = {"mobilevit_xs@224": (0.7,), "vit_tiny": (0.5,), "vit_base": (0.7,), "swin_base": (0.7,)}
FEWER |= {"deit3_small": (0.5,), "registers": (0.7,), "mobilevit_xs@256": (0.7, 0.5)}
FLOORS = {"mobilevit_xs": 0.53, "mobilevit_s": 0.45}
PEERS = {
    "vit_small": 0.7,
    "swin_tiny": 0.7,
    "mobilevit_xs@256": 0.75,
    "mobilevit_s@256": 0.7,
    "efficientvit_b1@224": 0.75,
}


def on_meta(key):
    name, size = MODELS[key]
    arguments = {"img_size": size} if "dinov2" in name else {}
    with torch.device("meta"):
        return timm.create_model(name, **arguments).eval(), size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "ratio"),
    [
        pytest.param(key, ratio, marks=pytest.mark.exhaustive if key in AGAIN else [])
        for key in MODELS
        for ratio in FEWER.get(key, RATIOS)
    ],
)
def test_ltm_meets_the_budget(key, ratio):
    model, size = on_meta(key)
    before = ltm.gmacs(model, size)
    if ratio < FLOORS.get(MODELS[key][0], 0):
        with pytest.raises(ValueError, match=r"cannot go below 0\.5"):
            ltm.merge_tokens_(model, ltm.LTM(ratio=ratio), size)
        return
    report = ltm.merge_tokens_(model, ltm.LTM(ratio=ratio), size)
    for _, merger in ltm.api.mergers(model):
        merger.activate_()
    share = ltm.gmacs(model, size) / before
    assert share == pytest.approx(report.share, abs=1e-6)
    grid = isinstance(ltm.token_counts(model)[0], tuple)
    assert ratio - (0.05 if grid else 0.02) <= share <= ratio


@pytest.mark.slow
@pytest.mark.parametrize("key", PEERS)
@pytest.mark.parametrize(
    "method", [ltm.ToMe, pytest.param(ltm.ToFu, marks=pytest.mark.exhaustive), ltm.LTMP]
)
def test_peers_meet_theirs(key, method):
    model, size = on_meta(key)
    ratio = PEERS[key]
    report = ltm.merge_tokens_(model, method(ratio=ratio), size)
    assert ratio - 0.05 <= report.share <= ratio


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", ["vit_small", "swin_tiny", "mobilevit_s@256", "efficientvit_b1@224"]
)
def test_per_block_is_the_letter(key):
    model, size = on_meta(key)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.7, support=ltm.Learned()), size)
    sites = model.token_merging.sites
    assert len(sites) == sites[0].depth
    for site in sites:
        if site.grid_in is None:
            assert site.num_out == math.ceil(0.7 * site.num_in)
        else:
            root = math.sqrt(0.7)
            assert site.grid_out == tuple(math.ceil(side * root) for side in site.grid_in)


def test_a_budget_below_the_floor_names_it():
    model, size = on_meta("efficientvit_b1@224")
    with pytest.raises(ValueError, match=r"tome on this network cannot go below 0\.\d+"):
        ltm.merge_tokens_(model, ltm.ToMe(ratio=0.3), size)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("swin_tiny_patch4_window7_224", {"depths": (2, 2, 2, 2)}), ("mobilevit_s", {})],
)
@pytest.mark.slow
def test_matching_on_grids_keeps_more_tokens_where_more_may_be_spent(name, arguments):
    kept = []
    for ratio in (0.95, 0.9, 0.85):
        with torch.device("meta"):
            model = timm.create_model(name, **arguments)
        report = ltm.merge_tokens_(model, ltm.LTM(ratio=ratio, support=ltm.Matched()))
        kept.append(min(site.num_out / site.num_in for site in report.sites))
    assert kept == sorted(kept, reverse=True), kept
    assert min(kept) > 0.35


METHODS = [ltm.LTM, ltm.ToMe, ltm.ToFu, ltm.PiToMe, ltm.DiffRate, ltm.DTEM]


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_so_many_tokens_leave_the_network_in_the_order_of_their_positions(method, tmp_path):
    model, images = toy("vit"), pictures("vit")
    config = method(num_tokens=30)
    report = ltm.merge_tokens_(model, config)
    assert report.sites[-1].num_out == 30
    assert report.sites[-1].block < report.num_blocks - 1
    *_, weights = ltm.merge_maps(model, images).values()
    assert weights.shape[1:] == (36, 30)
    for image in weights:  # Tokens of one patch say where they stand.
        places = image.argmax(dim=0)[(image > 0).sum(dim=0) == 1]
        assert len(places) > 20
        assert bool((places.diff() > 0).all())
    again = ltm.load(ltm.save(model, tmp_path), toy("vit"))
    assert again.token_merging.config == config
    assert torch.equal(again(images), model(images))


def test_a_number_of_tokens_that_cannot_leave_is_refused():
    with pytest.raises(ValueError, match="this network has 36 patch tokens"):
        ltm.merge_tokens_(toy("vit"), ltm.LTM(num_tokens=37))
    with pytest.raises(ValueError, match="form grids"):
        ltm.merge_tokens_(toy("swin"), ltm.LTM(num_tokens=9), 112)
    with pytest.raises(ValueError, match="LTMP keeps another number of every image"):
        ltm.LTMP(num_tokens=9)
    with pytest.raises(ValueError, match="give one of ratio, per_block, counts and num_tokens"):
        ltm.LTM(num_tokens=9, ratio=0.5)
    assert method_config("ltm:num_tokens=9", 0.7) == ltm.LTM(num_tokens=9)


def test_a_block_that_is_called_by_keyword_is_counted_once():
    class Host(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = torch.nn.Linear(8, 8)

        def forward(self, images):
            return self.block(input=images.flatten(2))

    with torch.device("meta"):
        host, images = Host(), torch.empty(1, 3, 2, 4)
    counter = _MacCounter(host, images)
    assert [counter.count([host.block], None, TokenState()) for _ in range(2)] == [3 * 64] * 2
