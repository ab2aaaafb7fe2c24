"""The proof of the design: a method that is defined here works everywhere, with no other edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import timm
import torch
from jaxtyping import Float
from torch import Tensor, nn

import ltm
from ltm.api import conversion_of, fit_, mergers
from ltm.core.merge import MatchedMerge, token_sizes
from ltm.data.shapes import example_pictures
from ltm.data.transforms import image_spec
from ltm.evaluation.evaluate import evaluate
from ltm.methods import MethodConfig, config_from_dict, methods
from ltm.methods.base import (
    _METHODS,  # pyright: ignore[reportPrivateUsage] - to forget the toy after its test
    Decision,
    ExtraLoss,
    Hints,
    Images,
    Merger,
    Site,
)
from ltm.models import method_config
from ltm.report.curves import Point, accuracy_figure, display_name
from ltm.training.optimisation import parameter_groups
from ltm.training.settings import OptimSettings

DATA = "shapes:classes=4,size=32,images=160,val_images=160,seed=0"


class NeighbourMerger(Merger):
    """Runs of neighbours become one token; how much the first of them counts is learned."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.first = nn.Parameter(torch.zeros(()))
        self.fitted = False

    def forward(self, tokens: Float[Tensor, "b t c"], hints: Hints) -> Decision:
        k, size = self.site.num_prefix, token_sizes(tokens, hints.size)
        num_in = tokens.shape[1] - k
        place = torch.arange(num_in, device=tokens.device) * hints.num_out // num_in
        prefix = torch.arange(k, device=tokens.device)
        assignment = torch.cat([prefix, place + k])
        leads = torch.cat([assignment.new_ones(1), assignment.diff()]) > 0
        return Decision(
            merge=MatchedMerge(
                assignment=assignment.expand(len(tokens), -1),
                weight=size * torch.where(leads, self.first.exp(), 1.0),
                num_places=k + hints.num_out,
                num_prefix=k,
            )
        )


@dataclass(frozen=True, kw_only=True)
class Neighbours(MethodConfig):
    """Neighbours become one token."""

    pull: float = 0.1
    """Weight of the loss that keeps the first of neighbours from counting more."""

    name: ClassVar[str] = "neighbours"
    colour: ClassVar[str | None] = "#123456"

    def build(self, site: Site) -> Merger:
        return NeighbourMerger(site)

    def fit_(self, mergers: Sequence[Merger], images: Images, *, tolerance: float) -> None:
        assert 0 < images.share() < 1
        for merger in mergers:
            assert isinstance(merger, NeighbourMerger)
            merger.fitted = True

    def learning_rate(self, parameter: str) -> float | None:
        return 0.5 if parameter == "first" else None

    def extra_loss(
        self, mergers: Sequence[Merger], share: Callable[[Tensor], Tensor]
    ) -> ExtraLoss | None:
        firsts = [merger.first for merger in mergers if isinstance(merger, NeighbourMerger)]
        return ExtraLoss(value=self.pull * torch.stack(firsts).square().sum())


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """Other tests go over all methods, and this one is not among them."""
    _METHODS[Neighbours.name] = Neighbours
    yield
    del _METHODS[Neighbours.name]


_METHODS.pop(Neighbours.name)


def network(**arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **small, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(40, 3, 32, 32)


def test_it_says_who_it_is() -> None:
    assert methods()["neighbours"] is Neighbours
    assert Neighbours.title == display_name("neighbours") == "Neighbours"
    assert Neighbours.description == "Neighbours become one token"
    config = method_config("neighbours:pull=0.2,sites=1+2", 0.8)
    assert config == Neighbours(ratio=0.8, pull=0.2, sites=(1, 2))
    assert config_from_dict(config.to_dict()) == config


@torch.no_grad()
def test_it_converts_freezes_saves_and_loads(images: Tensor, tmp_path: Path) -> None:
    model = network()
    before = model(images)
    report = ltm.merge_tokens_(model, Neighbours(ratio=0.7))
    assert report.share <= 0.7
    assert "neighbours on vit" in str(report)
    fit_(model, images)
    assert all(merger.fitted for _, merger in mergers(model))  # type: ignore[union-attr]
    (first, *_) = ltm.merge_maps(model, images).values()
    torch.testing.assert_close(first.sum(1), torch.ones_like(first[:, 0]))
    merged = model(images)
    ltm.set_ratio_(model, 0.8)
    ltm.set_ratio_(model, 0.7)
    torch.testing.assert_close(ltm.freeze_(model)(images), merged)
    ltm.save(model, tmp_path)
    loaded = ltm.load(tmp_path, network())
    assert conversion_of(loaded).config == Neighbours(ratio=0.7)
    torch.testing.assert_close(loaded(images), merged)
    ltm.unmerge_tokens_(loaded)
    torch.testing.assert_close(loaded(images), before)


@pytest.mark.slow
def test_it_is_calibrated(images: Tensor) -> None:
    found = ltm.calibrate(network(), images, config=Neighbours(), budget=0.8, trials=6, sites=2)
    assert isinstance(found.config, Neighbours)
    assert found.share <= 0.8
    assert found.config.sites is not None
    assert "tokens" in str(found)


def test_its_parameters_have_their_learning_rate() -> None:
    model = network()
    ltm.merge_tokens_(model, Neighbours(ratio=0.8))
    groups = parameter_groups(model, OptimSettings(lr=1e-3), 1e-3)
    (own,) = [group for group in groups if group["lr_scale"] == 500]
    assert len(own["params"]) == len(list(mergers(model)))


@pytest.mark.slow
def test_it_trains_and_is_evaluated(tmp_path: Path) -> None:
    trained = ltm.train(
        network(),
        DATA,
        output=tmp_path / "run",
        method="neighbours",
        ratio=0.8,
        epochs=1,
        warm_epochs=0,
        batch_size=16,
        workers=0,
        device="cpu",
    )
    assert conversion_of(trained.model).config == Neighbours(ratio=0.8)
    assert any(float(m.first.detach()) != 0 for _, m in mergers(trained.model))  # type: ignore[union-attr]
    found = evaluate(
        ltm.load(tmp_path / "run", network()), DATA, workers=0, device="cpu", images=40
    )
    assert "neighbours" in str(found).lower()


@pytest.mark.slow
def test_it_compresses_with_a_report(tmp_path: Path) -> None:
    result = ltm.compress(
        network(),
        DATA,
        method="neighbours",
        ratio=0.8,
        compare=("tome",),
        calibration_trials=4,
        calibration_images=32,
        bottleneck_images=0,
        time=False,
        pictures="generated",
        workers=0,
        device="cpu",
    )
    assert result.model is not None
    assert isinstance(conversion_of(result.model).config, Neighbours)
    report = (result.save(tmp_path) / "report.html").read_text()
    assert "Neighbours" in report
    assert Neighbours.description in report


def test_it_has_its_colour_in_curves() -> None:
    pytest.importorskip("matplotlib")
    figure = accuracy_figure([Point(method="neighbours", cost=1.0, accuracy=0.5)], "GMACs")
    (axes,) = figure.axes
    assert any(line.get_color() == "#123456" for line in axes.lines)


@pytest.mark.slow
def test_it_is_on_the_page(images: Tensor) -> None:
    pytest.importorskip("gradio")
    from ltm.web.inspection import inspect
    from ltm.web.networks import Networks, as_network

    model = network()
    from ltm.data.config import DataConfig

    mine = as_network("mine", model, image_spec(DataConfig(), model), None, sample=images)
    assert "Neighbours" in mine.methods
    networks = Networks({"mine": mine})
    merging = networks.merging("mine", "Neighbours", 0.8)
    seen = inspect(mine, merging, example_pictures(1)[0].image, rounds=0)
    assert seen.mmacs_after <= 0.8 * seen.mmacs_before
