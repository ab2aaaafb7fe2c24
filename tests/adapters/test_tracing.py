"""Compilation without a graph break, export with a dynamic batch, and what freezing leaves."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ltm
from toys import pictures, size_of, toy

CASES = [
    ("vit", ltm.LTM(ratio=0.8)),
    ("vit", ltm.LTM(ratio=0.8, support="learned")),
    ("vit", ltm.ToMe(ratio=0.8)),
    ("vit", ltm.ToFu(ratio=0.8)),
    ("vit", ltm.LTMP(ratio=0.8)),
    ("pooled", ltm.LTM(ratio=0.8)),
    ("swin", ltm.LTM(ratio=0.8)),
    ("mobilevit", ltm.LTM(ratio=0.85)),
    ("efficientvit", ltm.LTM(ratio=0.8)),
]
IDS = [f"{name}-{config.name}-{getattr(config, 'support', None)}" for name, config in CASES]


def prepared(name, config):
    model, images = toy(name), pictures(name, batch=3)
    ltm.merge_tokens_(model, config, size_of(name))
    if config.name == "ltm":
        ltm.collect_statistics_(model, [images])
    return model, images


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), CASES, ids=IDS)
def test_compiles_whole(name, config, unchecked_shapes):
    model, images = prepared(name, config)
    with torch.no_grad():
        expected = model(images)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(images), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), CASES, ids=IDS)
def test_exports_with_a_dynamic_batch(name, config, unchecked_shapes):
    model, images = prepared(name, config)
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},)).module()
        other = torch.cat([images, images.flip(-1)])
        torch.testing.assert_close(program(other), model(other), atol=1e-5, rtol=1e-4)


class Sizes(TorchDispatchMode):
    """Notes every result of an operation: its name and how many values it holds."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.append((func.__name__.split(".")[0], out.numel()))
        return out


PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul"}


def products_at_a_site(name, config):
    model = toy(name)
    ltm.merge_tokens_(model, config, size_of(name))
    ltm.freeze_(model)
    merger = next(merger for _, merger in ltm.api.mergers(model))
    site = merger.site
    tokens = torch.randn(4, site.num_prefix + site.num_in, site.width)
    from ltm.methods.base import Hints

    hints = Hints(num_out=site.num_out, grid_in=site.grid_in, grid_out=site.grid_out)
    with torch.no_grad(), Sizes() as sizes:
        decision = merger(tokens, hints)
        decision.merge(tokens)
        decision.merge.sizes(torch.ones(1, tokens.shape[1]))
    products = [op for op, _ in sizes.seen if op in PRODUCTS]
    small = 4 * min(site.num_in, site.num_out)
    views = {
        "view",
        "_unsafe_view",
        "expand",
        "t",
        "transpose",
        "clone",
        "detach",
        "alias",
        "unsqueeze",
    }
    large = [(op, n) for op, n in sizes.seen if n >= small and op not in PRODUCTS | views]
    return products, large


@pytest.mark.parametrize(
    ("name", "count"), [("vit", 1), ("swin", 2), ("mobilevit", 2), ("efficientvit", 2)]
)
def test_a_frozen_static_site_is_its_products_and_nothing_else(name, count, unchecked_shapes):
    config = ltm.LTM(ratio=0.85, support="learned", weights="uniform")
    products, large = products_at_a_site(name, config)
    assert len(products) == count
    assert not large


def test_matching_makes_no_tensor_of_pairs_by_channels(unchecked_shapes):
    model, images = prepared("vit", ltm.LTM(ratio=0.8))
    site = next(m.site for _, m in ltm.api.mergers(model))
    with torch.no_grad(), Sizes() as sizes:
        model(images)
    assert max(n for _, n in sizes.seen) < len(images) * site.num_in * site.num_out * 16
