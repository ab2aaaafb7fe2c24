"""Features of converted networks: their mean, all patches again, and a word about it."""

import warnings

import pytest
import timm
import torch

import ltm
from toys import pictures, size_of, toy

UNPOOLED = {"num_classes": 0, "global_pool": "", "img_size": 64, "depth": 4}
QUIET = pytest.mark.filterwarnings("ignore:This network gives merged tokens")


@QUIET
@pytest.mark.parametrize("name", ["pooled", "relative_shared", "beit", "naflex"])
@torch.no_grad()
def test_the_mean_of_tokens_is_that_of_the_pool(name):
    model, images = toy(name), pictures(name)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7), size_of(name))
    features = model.forward_features(images)
    model(images.flip(0))
    logits = model.head(model.fc_norm(ltm.pool_tokens(model, features)))
    torch.testing.assert_close(logits, model(images))


@QUIET
@pytest.mark.parametrize("name", ["vit", "pooled"])
@torch.no_grad()
def test_copies_of_features_are_those_of_the_last_forward_or_refused(name):
    """As long as features of an earlier forward are held, they could be theirs."""
    model, images = toy(name), pictures(name)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7))
    first = model.forward_features(images)
    expected = ltm.pool_tokens(model, first)
    torch.testing.assert_close(ltm.pool_tokens(model, first.double()), expected.double())
    second = model.forward_features(images.flip(3))
    torch.testing.assert_close(ltm.pool_tokens(model, first), expected)
    for use in (ltm.pool_tokens, ltm.restore_tokens):
        with pytest.raises(ValueError, match="give features as they were returned"):
            use(model, first.double())
    if name == "pooled":
        with pytest.raises(ValueError, match="give features as they were returned"):
            model.forward_head(first.clone())
    del first
    expected = ltm.pool_tokens(model, second)
    torch.testing.assert_close(ltm.pool_tokens(model, second.double()), expected.double())


@QUIET
@torch.no_grad()
def test_what_a_network_returns_is_taken_and_anything_else_refused_in_one_sentence():
    model = toy("naflex")
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7), 48)
    rows = torch.arange(6)
    given = {
        "patches": torch.randn(2, 36, 8 * 8 * 3),
        "patch_coord": torch.cartesian_prod(rows, rows).expand(2, -1, -1),
        "patch_valid": (torch.arange(36) < 30).expand(2, -1),
    }
    features = model.forward_features(**given)
    assert isinstance(features, dict)
    expected = ltm.pool_tokens(model, features["patches"])
    assert torch.equal(ltm.pool_tokens(model, features), expected)
    for wrong in (features["patches"].numpy(), (features["patches"],), None, {"logits": 1}):
        for use in (ltm.pool_tokens, ltm.restore_tokens):
            with pytest.raises(ValueError, match=r"features: got .* give the tokens"):
                use(model, wrong)


@QUIET
@torch.no_grad()
def test_restored_tokens_are_those_of_the_original_where_nothing_merged():
    model, images = toy("vit"), pictures("vit")
    shape = model.forward_features(images).shape
    ltm.merge_tokens_(model, ltm.LTM(counts=(20,), sites=(3,)))
    features = model.forward_features(images)
    whole = ltm.restore_tokens(model, features)
    assert whole.shape == shape
    sizes = model.token_merging.sizes
    assert sizes.shape == features.shape[:2]
    assert bool((sizes[:, 1:].sum(dim=1) == 36).all())
    torch.testing.assert_close(whole[:, 1:].mean(dim=1), ltm.pool_tokens(model, features))
    torch.testing.assert_close(whole[:, 0], features[:, 0])


@torch.no_grad()
def test_features_of_other_forwards_and_maps_are_refused():
    model = toy("vit")
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7))
    model(pictures("vit"))
    with pytest.raises(ValueError, match="features: got"):
        ltm.pool_tokens(model, torch.randn(2, 37, 32))
    with pytest.raises(ValueError, match="forward_intermediates"):
        ltm.restore_tokens(model, torch.randn(2, 9, 9, 32))


@torch.no_grad()
def test_a_network_without_a_pool_says_once_that_its_tokens_are_merged():
    model = timm.create_model("vit_tiny_patch16_224", **UNPOOLED).eval()
    images = torch.randn(1, 3, 64, 64)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.8))
    with pytest.warns(UserWarning, match=r"ltm\.pool_tokens"):
        model(images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.forward_features(images)
        ltm.gmacs(model)


@pytest.mark.parametrize("name", ["pooled", "eva02", "naflex"])
@torch.no_grad()
def test_a_network_with_a_pool_says_so_of_features_that_its_own_pool_does_not_get(name):
    model, images = toy(name), pictures(name)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7), size_of(name))
    model(images)  # Warnings are errors: here it says nothing.
    with pytest.warns(UserWarning, match=r"ltm\.pool_tokens"):
        model.forward_features(images)
    model.forward_features(images)


@pytest.mark.slow
def test_a_default_that_is_out_of_reach_is_adapted_and_said():
    with torch.device("meta"):
        model = timm.create_model("efficientvit_l1")
    with pytest.warns(UserWarning, match="cannot go below"):
        report = ltm.merge_tokens_(model, ltm.LTM())
    assert report.share <= ltm.api.conversion_of(model).config.ratio < 0.9
    ltm.unmerge_tokens_(model)
    with pytest.raises(ValueError, match="cannot go below"):
        ltm.merge_tokens_(model, ltm.LTM(ratio=0.7))


def test_too_many_classes_for_the_informative_step_are_said():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", num_classes=11221)
    with pytest.warns(UserWarning, match="the informative step is left out"):
        ltm.merge_tokens_(model, ltm.LTM())
