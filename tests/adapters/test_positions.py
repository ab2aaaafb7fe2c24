"""Where merged tokens stand, and padding that is no token."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import ltm
from ltm.adapters.blocks import Tokens
from ltm.methods import methods
from toys import pictures, toy

BIASED = ["relative", "relative_shared", "beit", "beit_alone"]


@pytest.mark.parametrize("name", BIASED)
@torch.no_grad()
def test_a_bias_goes_with_its_tokens(name):
    """A block whose tokens come in another order gives the same in that order."""
    model: Any = toy(name)
    ltm.merge_tokens_(model, ltm.LTM(ratio=1))
    if name == "relative_shared":
        shared = model.shared_rel_pos.get_bias()
    else:
        shared = model.rel_pos_bias() if name == "beit" else None
    count, state, block = 36 + model.num_prefix_tokens, model.token_merging.state, model.blocks[1]
    x, order = torch.randn(2, count, 32), torch.stack([torch.randperm(count) for _ in range(2)])
    state.open()
    expected = block(x, shared)
    state.leave(0, Tokens(positions=order))
    moved = block(x.gather(1, order[..., None].expand_as(x)), shared)
    torch.testing.assert_close(moved, expected.gather(1, order[..., None].expand_as(x)))
    state.leave(0, Tokens())
    assert (block(x, shared) - expected).abs().max() < 1e-6


@torch.no_grad()
def test_beit_tells_its_mergers_queries_and_keys_with_their_bias():
    model: Any = toy("beit")
    for block in model.blocks:
        block.attn.q_bias.normal_()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    block = next(block for block in model.blocks if block.merger is not None)
    seen, look = [], block.look
    block.look = lambda qkv, *args, **context: seen.append(qkv) or look(qkv, *args, **context)
    entered = []
    block.norm1.register_forward_hook(lambda _, __, out: entered.append(out))
    model(pictures("beit"))
    bias = torch.cat([block.attn.q_bias, block.attn.k_bias, block.attn.v_bias])
    expected = functional.linear(entered[0], block.attn.qkv.weight, bias)
    torch.testing.assert_close(seen[0], expected)


def padded(batch=2, length=36, valid=24):
    torch.manual_seed(0)
    places = torch.arange(length)
    coordinates = torch.stack([places // 6, places % 6], dim=-1).expand(batch, -1, -1)
    real = (places < valid).expand(batch, -1)
    return {
        "patches": torch.randn(batch, length, 8 * 8 * 3),
        "patch_coord": torch.where(real[..., None], coordinates, 0),
        "patch_valid": real,
    }


@pytest.mark.filterwarnings("ignore:This network gives merged tokens")
@pytest.mark.parametrize("method", ["ltm", "ltmp", "tofu", "tome"])
@pytest.mark.parametrize("name", ["naflex", "naflex_rotary"])
@torch.no_grad()
def test_padding_never_merges(name, method):
    model, given = toy(name), padded()
    ltm.merge_tokens_(model, methods()[method](per_block=0.8), 48)
    features = model.forward_features(**given)
    assert (
        features["patches"].shape[1] - model.num_prefix_tokens == features["patch_valid"].shape[1]
    )
    before = model(given)
    noise = torch.randn_like(given["patches"])
    given["patches"] = torch.where(given["patch_valid"][..., None], given["patches"], noise)
    torch.testing.assert_close(model(given), before)
    alone = {key: value[:1] for key, value in given.items()}
    torch.testing.assert_close(model(alone), before[:1])


@pytest.mark.parametrize("form", ["masked", "letter"])
@torch.no_grad()
def test_the_mask_of_a_batch_meets_images_of_other_padding(form):
    """The batch shares its logits; sizes, and so the masks, are of every image."""
    model, given = toy("naflex"), padded()
    support = ltm.Learned(scope="batch", mask_form=form)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.6, support=support), 48)
    ltm.collect_statistics_(model, [(torch.randn(2, 3, 48, 48), torch.arange(2))])
    model.train()(given)
    together = model.eval()(given)
    alone = {key: value[:1] for key, value in given.items()}
    torch.testing.assert_close(model(alone), together[:1])


@torch.no_grad()
def test_only_padding_leaves_where_there_is_enough_of_it():
    model, given = toy("naflex"), padded(valid=20)
    before = model(given)
    ltm.merge_tokens_(model, ltm.LTM(counts=(28, 24), sites=(1, 2)), 48)
    torch.testing.assert_close(model(given), before, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_masks_of_a_users_own_are_refused():
    model, given = toy("naflex"), padded()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8), 48)
    with pytest.raises(ValueError, match="attn_mask"):
        model(given | {"attn_mask": torch.zeros(2, 1, 38, 38)})
