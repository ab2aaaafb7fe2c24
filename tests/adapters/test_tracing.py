"""Compilation without a graph break, export with a dynamic batch, and what freezing leaves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ltm
from ltm.methods import methods
from toys import TOYS, VARIANTS, pictures, size_of, toy


@pytest.fixture(scope="module")
def traces():
    """What every case gave, compiled and exported, by a process without shape assertions."""
    worker = Path(__file__).parents[1] / "tracing_worker.py"
    result = subprocess.run([sys.executable, worker], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_matching_compiles_whole():
    """The first cases of the table below; a `cached_property` broke the graph in Python 3.11."""
    code = "import tracing_worker as t; assert max(map(t.compiled, ('vit-ltm', 'vit-tome'))) < 1e-4"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_methods_on_vit_and_ltm_on_all_families_compile_whole(traces):
    """Without a graph break; LTMP masks there what it removes in eager mode."""
    found = {case: value for case, value in traces.items() if case.endswith("compiled")}
    assert len(found) == len(TOYS | VARIANTS) + 4
    assert all(isinstance(value, float) and value < 1e-4 for value in found.values()), found


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kernels_are_compiled_in_and_never_exported(traces):
    found = {case: value for case, value in traces.items() if case.endswith("kernels")}
    assert len(found) == 3
    assert all(graphs["exported"] == [] for graphs in found.values())
    compiled = {case: set(graphs["compiled"]) for case, graphs in found.items()}
    assert "ltm.inform_and_assign.default" in compiled.pop("vit-ltm-kernels")
    for case, operators in compiled.items():
        assert "ltm.inform.default" in operators, case
    assert "ltm.merge_grid.default" in compiled["efficientvit-ltm-kernels"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_informative_weights_on_all_families_are_exported(traces):
    """With a dynamic batch."""
    found = {case: value for case, value in traces.items() if case.endswith("exported")}
    assert len(found) == len(TOYS | VARIANTS)
    assert all(isinstance(value, float) and value < 1e-4 for value in found.values()), found


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
    config = ltm.LTM(ratio=0.85, support=ltm.Learned(), weights="uniform")
    products, large = products_at_a_site(name, config)
    assert len(products) == count
    assert not large


def test_matching_makes_no_tensor_of_pairs_by_channels(unchecked_shapes):
    model, images = toy("vit"), pictures("vit", batch=3)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8), size_of("vit"))
    site = next(m.site for _, m in ltm.api.mergers(model))
    with torch.no_grad(), Sizes() as sizes:
        model(images)
    assert max(n for _, n in sizes.seen) < len(images) * site.num_in * site.num_out * 16


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["ltm", "ltmp", "tofu", "tome"])
@torch.no_grad()
@pytest.mark.slow
def test_torchscript_traces_a_converted_vit(method, unchecked_shapes):
    model, images = toy("vit"), pictures("vit")
    ltm.merge_tokens_(model, methods()[method](ratio=0.8))
    traced = torch.jit.trace(model, images)
    torch.testing.assert_close(traced(images.flip(0)), model(images.flip(0)))
