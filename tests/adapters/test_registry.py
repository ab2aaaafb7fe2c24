"""Every name in timm's registry that a family claims is converted on `meta`, or refused by reason.

A small sample here; all of them by `make registry` (`LTM_REGISTRY=all`), which prints the counts.
"""

import os
import warnings
from collections import Counter

import pytest
import timm
import torch

import ltm
from ltm.adapters import adapters

SAMPLE = (
    "vit_base_patch16_siglip_224",
    "vit_small_patch16_dinov3",
    "eva02_tiny_patch14_224",
    "vit_pe_core_tiny_patch16_384",
    "vit_small_patch16_rope_mixed_224",
    "swinv2_tiny_window8_256",
    "efficientvit_l1",
)
LEAST = 254
"""Names of timm 1.0.30 that convert at 0.70 with the default settings."""


def outcome(name: str) -> tuple[str, str]:
    """The class of a network, and what becomes of it: "converted", a reason, or "crash: ..."."""
    with torch.device("meta"):
        model = timm.create_model(name)
    if not any(adapter.finds(model) for adapter in adapters()):
        return type(model).__name__, "no family"
    try:
        share = ltm.merge_tokens_(model, ltm.LTM(ratio=0.7)).share
    except ValueError as error:
        return type(model).__name__, str(error)
    except Exception as error:  # noqa: BLE001 - a crash is what is looked for
        return type(model).__name__, f"crash: {error!r}"
    return type(model).__name__, "converted" if share <= 0.7 else f"crash: share {share}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_name_is_converted_or_refused_by_reason(name: str) -> None:
    _, found = outcome(name)
    reasons = ("model: ", "ratio: ", "weights: ")
    assert found in ("converted", "no family") or found.startswith(reasons)


@pytest.mark.skipif(os.environ.get("LTM_REGISTRY") != "all", reason="make registry")
def test_all_names_of_the_registry() -> None:
    warnings.simplefilter("ignore")
    found = {name: outcome(name) for name in timm.list_models() if not name.startswith("ltm_")}
    for (kind, says), number in sorted(Counter(found.values()).items()):
        if says != "no family":
            print(f"{number:4} {kind}: {says}")
    crashed = {name: says for name, (_, says) in found.items() if says.startswith("crash")}
    assert not crashed
    assert sum(says == "converted" for _, says in found.values()) >= LEAST
