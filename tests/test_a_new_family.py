"""A family is one file: a network of its own, registered here, goes through everything else."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltm
from ltm.adapters.base import Adapter, Block, Layout, Run, register, unregister
from ltm.adapters.blocks import (
    MergingMixin,
    TokenState,
    become_,
    convert_block_,
    make_slots,
    revert_block_,
)
from ltm.api import report
from ltm.core.attention import size_bias
from ltm.data.config import DataConfig
from ltm.data.shapes import example_pictures
from ltm.data.transforms import image_spec
from ltm.methods.base import MethodConfig, Site
from ltm.web.inspection import inspect
from ltm.web.networks import Networks, as_network

SIZE, CLASSES = 32, 4
DATA = f"shapes:classes={CLASSES},size={SIZE},images=64,val_images=96"


# The network, as somebody else wrote it.


class RibbonAttention(nn.Module):
    """Two heads, one projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(attended.transpose(1, 2).flatten(2))


class RibbonBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = RibbonAttention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class Ribbon(nn.Module):
    """A transformer without prefix tokens, whose head reads the mean token."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.num_classes, self.num_features = CLASSES, width
        self.pretrained_cfg = {"input_size": (3, SIZE, SIZE), "num_classes": CLASSES}
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(0.1 * torch.randn(1, (SIZE // 4) ** 2, width))
        self.ribbon = nn.ModuleList(RibbonBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for block in self.ribbon:
            x = block(x)
        return self.head(self.mean(x))

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


# The family: all that has to be written for it.


class MergingRibbonBlock(MergingMixin, RibbonBlock):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.entering(x)
        size = tokens.size if self.slot.proportional else None
        bias = None if size is None else size_bias(size, x.dtype)
        z = x + self.attention(self.before(x), bias)
        z, *_ = self.merge(z, tokens)
        return z + self.mlp(self.after(z))

    def look(self, qkv: Tensor, size: Tensor | None, needs: frozenset[str]) -> dict[str, Tensor]:
        query, key, _ = qkv.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        received = (query @ key.mT * key.shape[-1] ** -0.5).softmax(dim=-1).mean(dim=(1, 2))
        found = {"keys": key.mean(dim=1), "importance": received, "attention": received}
        return {name: found[name] for name in needs}


class MergingRibbon(Ribbon):
    def mean(self, x: Tensor) -> Tensor:
        slot = self.ribbon[-1].slot
        size = slot.state.left_by(slot.index).size
        if size is None:
            return super().mean(x)
        return (x * (size / size.sum(dim=1, keepdim=True))[..., None].to(x.dtype)).sum(dim=1)


class RibbonAdapter(Adapter):
    family: ClassVar[str] = "ribbon"
    hosts: ClassVar[tuple[type[nn.Module], ...]] = (Ribbon,)
    covers: ClassVar[str] = "Ribbon"

    def refusal(self, model: nn.Module) -> str | None:
        return None

    def layout(self, model: Any, image_size: tuple[int, int]) -> Layout:
        grid = (image_size[0] // 4, image_size[1] // 4)
        blocks = tuple(
            Block(f"ribbon.{i}", model.num_features, stage=0) for i in range(len(model.ribbon))
        )
        run = Run(grid[0] * grid[1], grid, tuple(range(len(blocks))))
        return Layout(blocks, 0, model.num_classes, (run,))

    def convert_(
        self, model: Any, config: MethodConfig, sites: Sequence[Site], state: TokenState
    ) -> None:
        starts = [index == 0 for index in range(len(model.ribbon))]
        for block, slot in zip(model.ribbon, make_slots(config, sites, state, starts), strict=True):
            convert_block_(block, config, slot, MergingRibbonBlock, block.attention.project)
        become_(model, MergingRibbon)

    def units(self, model: Any) -> list[nn.Module]:
        return list(model.ribbon)

    def revert_(self, model: Any) -> None:
        for block in model.ribbon:
            revert_block_(block, RibbonBlock, block.attention.project)
        become_(model, Ribbon)


@pytest.fixture(autouse=True)
def _family() -> Iterator[None]:
    register(RibbonAdapter)
    yield
    unregister(RibbonAdapter)


@pytest.fixture
def model() -> Ribbon:
    torch.manual_seed(0)
    return Ribbon().eval()


@pytest.fixture
def images() -> Tensor:
    return F.interpolate(torch.randn(32, 3, 8, 8), (SIZE, SIZE), mode="bilinear")


METHODS = [ltm.LTM, ltm.ToMe, ltm.ToFu, ltm.LTMP]


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_it_is_converted_and_given_back(model: Ribbon, images: Tensor, method: Any) -> None:
    expected = model(images)
    ltm.merge_tokens_(model, method(ratio=1.0), SIZE)
    assert torch.equal(model(images), expected)
    ltm.unmerge_tokens_(model)
    ltm.merge_tokens_(model, method(ratio=0.7), SIZE)
    assert model(images).shape == expected.shape
    assert not torch.equal(model(images), expected)
    assert ltm.token_counts(model)[-1] < 64
    ltm.unmerge_tokens_(model)
    assert type(model) is Ribbon
    assert torch.equal(model(images), expected)


@torch.no_grad()
def test_it_is_frozen_saved_and_loaded(model: Ribbon, images: Tensor, tmp_path: Path) -> None:
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.7), SIZE)
    ltm.collect_statistics_(model, [(images, torch.arange(32) % CLASSES)])
    ltm.freeze_(model)
    expected = model(images)
    ltm.save(model, tmp_path)
    again = ltm.load(tmp_path, model=Ribbon())
    torch.testing.assert_close(again.eval()(images), expected)
    assert set(ltm.merge_maps(model, images))


def test_its_schedule_is_calibrated(model: Ribbon, images: Tensor) -> None:
    found = ltm.calibrate(model, images, budget=0.8, trials=4, sites=2, device="cpu")
    ltm.merge_tokens_(model, found.config, SIZE)
    assert report(model).macs_after <= 0.8 * report(model).macs_before


def test_it_is_evaluated(model: Ribbon) -> None:
    found = ltm.evaluate(model, DATA, methods=("tome", "ltm"), images=16, workers=0, device="cpu")
    assert {"tome", "ltm"} <= set(found.metrics["models"])


def test_it_is_trained(model: Ribbon, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "batch_size": 16, "image_size": SIZE, "workers": 0}
    found = ltm.train(model, DATA, output=tmp_path / "run", device="cpu", **options)
    assert found.metrics["epoch"] == 1


def test_it_is_compressed_with_a_report(model: Ribbon, tmp_path: Path) -> None:
    found = ltm.compress(
        model, DATA, compare=("tome",), calibration_images=32, calibration_trials=3, images=16,
        time=False, bottleneck_images=8, workers=0, device="cpu",
    )  # fmt: skip
    found.save(tmp_path / "small")
    assert (tmp_path / "small" / "report.html").is_file()


def test_the_page_shows_it(model: Ribbon, images: Tensor) -> None:
    pytest.importorskip("gradio")
    mine = as_network("mine", model, image_spec(DataConfig(), model), None, sample=images)
    merging = Networks({"mine": mine}).merging("mine", ltm.ToMe.title, 0.7)
    seen = inspect(mine, merging, example_pictures(1)[0].image, rounds=0)
    assert seen.layers[-1].tokens_after < seen.layers[-1].tokens_before == 64
    assert seen.mmacs_after <= 0.7 * seen.mmacs_before
