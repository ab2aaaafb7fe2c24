"""What is known about tokens belongs to the forward that they come from."""

import copy

import pytest
import torch
from timm.layers.drop import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch._dynamo.exc import Unsupported

import ltm
from ltm.adapters import adapter_of
from ltm.api import announcing, conversion_of, mergers
from ltm.methods import methods
from ltm.methods.frozen import FrozenMerger
from toys import TOYS, pictures, size_of, toy

pytestmark = pytest.mark.filterwarnings("ignore:This network gives merged tokens")


def converted(name, method="ltm", **settings):
    model = toy(name)
    ltm.merge_tokens_(
        model, methods()[method].from_settings(settings or {"ratio": 0.8}), size_of(name)
    )
    return model


def gradients(model, loss):
    model.zero_grad()
    loss().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("method", ["ltm", "tome", "tofu"])
def test_checkpointed_blocks_run_again_with_their_own_tokens(name, method):
    model, images = converted(name, method, per_block=0.9), pictures(name, batch=5)

    def two_views():
        return model(images[:2]).square().sum() + 2 * model(images[2:4]).square().sum()

    def another_between():
        loss = model(images[:2]).square().sum()
        with torch.no_grad():
            model(images[2:])
        return loss

    for loss in (two_views, another_between):
        model.set_grad_checkpointing(False)
        expected = gradients(model, loss)
        model.set_grad_checkpointing(True)
        assert torch.equal(gradients(model, loss), expected)


@pytest.mark.parametrize("name", ["pooled", "swin", "mobilevit", "efficientvit"])
@torch.no_grad()
def test_a_head_takes_the_features_of_any_forward(name):
    model, images = converted(name), pictures(name, batch=4)
    expected = model(images[:2])
    features = model.forward_features(images[:2])
    model(images[2:])
    model.forward_head(features, pre_logits=True)
    for _ in range(2):
        torch.testing.assert_close(model.forward_head(features), expected)


@torch.no_grad()
def test_features_that_nothing_is_known_about_are_refused():
    model = converted("pooled")
    features = model.forward_features(pictures("pooled", batch=3))
    with pytest.raises(ValueError, match="got features of 2 images, and the last forward had 3"):
        model.forward_head(features[:2])


@pytest.mark.parametrize("kind", ["max", "avgmax"])
@torch.no_grad()
def test_what_is_not_there_is_no_largest(kind):
    model, images = converted("vit", "ltmp", ratio=0.6), pictures("vit", batch=4)
    model.reset_classifier(model.num_classes, kind)
    together = model(images)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unchecked_shapes")
@torch.no_grad()
@pytest.mark.slow
def test_compiled_models_are_looked_into():
    def small(**settings):
        shape = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
        model = VisionTransformer(48, **shape).eval()
        ltm.merge_tokens_(model, ltm.LTM.from_settings({"per_block": 0.6, **settings}))
        return model

    model, images = small(), pictures("vit", batch=3)
    model.compile(backend="eager")
    model(images)
    merging = {site.block for site in conversion_of(model).sites if site.merges}
    assert set(ltm.merge_maps(model, images)) == merging
    ltm.collect_statistics_(model, [(images, torch.arange(3))])
    assert all(merger.active for _, merger in mergers(model))
    static = small(support="learned", weights="uniform")
    static.compile(backend="eager")
    static(images)
    ltm.freeze_(static)
    assert all(isinstance(merger, FrozenMerger) for _, merger in mergers(static))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("name", "compiled"),
    [("vit", [0, 2]), ("swin", [3]), ("mobilevit", [0]), ("efficientvit", [1])],
)
@torch.no_grad()
@pytest.mark.slow
@pytest.mark.exhaustive
def test_blocks_that_are_compiled_one_by_one_know_the_others_tokens(name, compiled):
    model, images = converted(name, per_block=0.8), pictures(name)
    expected = model(images)
    for index in compiled:
        adapter_of(model.token_merging.family).units(model)[index].compile(backend="eager")
    for batch in (images, images[:1]):
        torch.testing.assert_close(model(batch), expected[: len(batch)], atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_block_alone_makes_no_full_graph():
    block = converted("vit").blocks[3]
    block.compile(backend="eager", fullgraph=True)
    with pytest.raises(Unsupported):
        block(torch.randn(1, 37, 32))


def knowing(name, **settings):
    """A model in training whose masks depend on the labels; nothing else is random."""
    model = converted(name, per_block=0.6, labels="true", gain=1.0, **settings).train()
    for _, merger in mergers(model):
        step, merger.noise = merger.informative, 0.0
        torch.nn.init.orthogonal_(step.centroids)
        torch.nn.init.uniform_(step.costs, 1, 9)
        step.present.fill_(True)
        step.refresh_()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d | DropPath):
            module.eval()
    return model


@pytest.mark.parametrize("support", ["matching", "learned"])
@pytest.mark.parametrize("name", ["vit", "swin", "mobilevit"])
def test_blocks_that_run_again_know_the_labels(name, support):
    """Also where nobody announces them any more."""
    model, images = knowing(name, support=support), pictures(name, batch=3)

    def loss():
        with announcing(model, torch.arange(3)):
            return model(images).square().sum()

    without = gradients(model, lambda: model(images).square().sum())
    expected = gradients(model, loss)
    assert not torch.allclose(without, expected)
    model.set_grad_checkpointing(True)
    assert torch.equal(gradients(model, loss), expected)


@pytest.mark.usefixtures("unchecked_shapes")
@torch.no_grad()
@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_models_know_the_labels():
    model, images = knowing("vit", sites=(1, 2)), pictures("vit", batch=3)
    compiled, eager = torch.compile(model, backend="eager"), copy.deepcopy(model)
    for labels in (torch.arange(3), torch.tensor([4, 4, 1]), None):
        with announcing(model, labels), announcing(eager, labels):
            torch.testing.assert_close(compiled(images), eager(images))
