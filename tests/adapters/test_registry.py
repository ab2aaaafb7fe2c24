"""Every name in timm's registry that a family claims is converted on `meta`, or refused by reason.

A small sample here; all of them by `make registry` (`LTM_REGISTRY=all`), which prints the counts
and writes the list in docs/models.md.
"""

import os
import warnings
from collections import Counter
from pathlib import Path

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
    "vit_base_patch16_xp_224",
    "vit_relpos_small_patch16_224",
    "beitv2_base_patch16_224",
    "naflexvit_base_patch16_siglip",
    "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224",
    "efficientvit_l1",
)
LEAST = 330
"""Names of timm 1.0.30 that convert with the default settings."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def outcome(name: str) -> tuple[str, str]:
    """The class of a network, and what becomes of it: "converted", a reason, or "crash: ..."."""
    with torch.device("meta"):
        model = timm.create_model(name)
    kind = type(model).__name__
    claimed = any(adapter.finds(model) for adapter in adapters())
    try:
        share = ltm.merge_tokens_(model, ltm.LTM()).share
    except ValueError as error:
        unknown = f"model: {kind} has no block that can merge tokens" in str(error)
        return kind, "no family" if unknown and not claimed else str(error)
    except Exception as error:  # noqa: BLE001 - a crash is what is looked for
        return kind, f"crash: {error!r}"
    budget = ltm.api.conversion_of(model).config.ratio
    return kind, "converted" if share <= budget else f"crash: share {share}"


def page(found: dict[str, tuple[str, str]]) -> str:
    """The list of names, by class."""
    kinds = sorted({kind for kind, says in found.values() if says == "converted"})
    lines = [
        "# timm's networks that merge tokens",
        "",
        f"Written by `make registry` with timm {timm.__version__}.",
        "Each name was converted with the default settings, `ltm.LTM()`.",
        "Hugging Face transformers have [their own page](transformers.md).",
    ]
    for kind in kinds:
        names = [name for name, what in found.items() if what == (kind, "converted")]
        lines += ["", f"## {kind}: {len(names)}", "", ", ".join(f"`{name}`" for name in names)]
    refused = {n: says for n, (_, says) in found.items() if says not in ("converted", "no family")}
    lines += ["", f"## Refused: {len(refused)}", ""]
    lines += [f"- `{name}`: {says}" for name, says in refused.items()] or ["None."]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ratio")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_name_of_each_family_is_converted(name: str) -> None:
    assert outcome(name)[1] == "converted"
    assert f"`{name}`" in PAGE.read_text()


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
    PAGE.write_text(page(found))
