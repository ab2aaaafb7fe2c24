"""Settings of LTM: what belongs together is one value; 0.1.0's keywords and files still work."""

import dataclasses
from typing import Any

import pytest
import torch

from ltm.methods import LTM, ByFamily, Informative, Learned, Matched, config_from_dict
from ltm.methods.base import Hints, Site
from ltm.models import method_config


@pytest.mark.parametrize(
    ("old", "new", "advice"),
    [
        ({"support": "learned"}, LTM(support=Learned()), "support=Learned()"),
        ({"support": "matching"}, LTM(support=Matched()), "support=Matched()"),
        (
            {"support": "learned", "space": "token", "step": "raw", "labels": "true"},
            LTM(support=Learned(space="token"), weights=Informative(step="raw", labels="true")),
            "support=Learned(space='token'), weights=Informative(labels='true', step='raw')",
        ),
        (
            {"scope": "batch", "weights": "uniform"},
            LTM(support=Learned(scope="batch"), weights=None),
            "support=Learned(scope='batch')",
        ),
        (
            {"protection": 0.5},
            LTM(support=ByFamily(matched=Matched(protection=0.5))),
            "support=Matched(protection=0.5)",
        ),
        (
            {"support": "matching", "matching": "alternate", "eta": 2.0},
            LTM(support=Matched(matching="alternate"), weights=Informative(eta=2.0)),
            "support=Matched(matching='alternate'), weights=Informative(eta=2.0)",
        ),
        ({"weights": "informative"}, LTM(), "weights=Informative()"),
    ],
)
def test_old_keywords_work_and_name_the_new_form(
    old: dict[str, Any], new: LTM, advice: str
) -> None:
    with pytest.warns(DeprecationWarning, match=r"^LTM\(.*\): write LTM\(") as warned:
        made = LTM(**old)
    assert made == new
    (warning,) = warned
    assert str(warning.message).endswith(f"write LTM({advice}).")
    assert LTM.from_settings(old) == new  # words and files: no warning


def test_old_names_can_be_read_and_replaced() -> None:
    config = LTM(support=Matched(protection=0.5))
    with pytest.warns(DeprecationWarning, match=r"to_settings\(\)\['protection'\]"):
        assert config.protection == 0.5
    with pytest.raises(AttributeError, match="no attribute 'protektion'"):
        _ = config.protektion
    with pytest.warns(DeprecationWarning, match=r"write LTM\(support=Matched\(keep_norm=False\)\)"):
        changed = dataclasses.replace(config, keep_norm=False)
    assert changed == LTM(support=Matched(protection=0.5, keep_norm=False))


@pytest.mark.parametrize(
    "config",
    [
        LTM(),
        LTM(ratio=0.5, weights="uniform"),
        LTM(support=Learned(mask_form="letter", scope="batch"), weights=Informative(mlp=True)),
        LTM(support=Learned(candidates="all", by_size=False)),
        LTM(sites=(1, 4), counts=(20, 9), support=Matched(operators=("merge", "norm"))),
        LTM(support=ByFamily(matched=Matched(attended=0.0))),
        LTM(support=ByFamily(matched=Matched(protection=2.0), learned=Learned(candidates="all"))),
        LTM(support=ByFamily()),
    ],
)
def test_files_are_flat_and_come_back(config: LTM) -> None:
    values = config.to_dict()
    assert not any(isinstance(value, dict) for value in values.values())
    assert config_from_dict(values) == config
    assert config_from_dict(values, saved=True) == config
    assert method_config(config.words(), config.ratio) == config


def test_uniform_weights_are_none() -> None:
    assert LTM(weights="uniform") == LTM(weights=None)
    assert LTM(weights=None).to_settings()["weights"] == "uniform"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Informative(eta=0.0), "eta: got 0.0; it must be a number larger than 0"),
        (lambda: Learned(space="pixel"), "space: got 'pixel'; it must be 'pooled' or 'token'"),
        (lambda: Matched(size_power=0.0), "size_power: got 0; proportional_attention=False"),
        (lambda: LTM.from_settings({"support": "mached"}), "support: got 'mached'"),
        (
            lambda: LTM(support=Matched(protections=(1.0,))),
            "protections: got 1 of them, and sites=None",
        ),
        (
            lambda: LTM.from_settings({"support": "matching", "space": "token"}),
            "need support='learned'",
        ),
        (
            lambda: LTM.from_settings({"support": "learned", "operators": ("merge",)}),
            "operators: they belong to support='matching'",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_together_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("form", ["masked", "letter"])
def test_the_papers_mask_does_not_count_patches(form: Any) -> None:
    """All that enter a target weigh the same, whatever they stand for."""
    site = Site(
        block=0, depth=1, num_in=6, num_out=3, width=8, num_prefix=0, num_classes=0, grid=(1, 6)
    )
    size = torch.tensor([[1.0, 9.0, 1.0, 1.0, 1.0, 1.0]]).expand(2, -1)
    hints = Hints(num_out=3, size=size, carry=torch.zeros(2, 6))
    masks = {
        by_size: LTM(support=Learned(mask_form=form, by_size=by_size), counts=(3,))
        .build(site)
        .eval()(torch.randn(2, 6, 8), hints)
        .merge.weights()
        for by_size in (True, False)
    }
    counted, plain = masks[True], masks[False]
    assert not torch.allclose(counted, plain)
    enters = (plain > 0).float()
    assert torch.allclose(plain, enters / enters.sum(1, keepdim=True))
