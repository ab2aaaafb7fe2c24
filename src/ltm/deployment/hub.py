"""Models on the Hugging Face hub: config.json, model.safetensors and a card.

The folder is timm's layout with one more entry, `token_merging`. timm itself loads the network
without merging from it; `load_from_hub` and `ltm.load` load it as it was saved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ltm.api import conversion_of, load, report, save
from ltm.api.folders import CONFIG, WEIGHTS, read_config, require_own, write_config
from ltm.deployment.information import ModelInformation, describe
from ltm.extras import require
from ltm.files import results_in, write_text

_CARD = "README.md"


def prepare_folder(
    model: nn.Module,
    folder: Path,
    *,
    class_names: Sequence[str] | None = None,
    origin: Mapping[str, str] | None = None,
) -> Path:
    """Save a converted model as the hub expects it; a card that exists is kept.

    `origin` may name a `base_model`, a `license` and `datasets` for the card.
    """
    information = describe(model, class_names=class_names)
    require_own(folder)
    with results_in(folder) as aside:
        _write(model, aside, information)
        if not (folder / _CARD).exists():
            write_text(aside / _CARD, card(model, information, origin or {}))
    return folder


def _write(model: nn.Module, folder: Path, information: ModelInformation) -> None:
    save(model, folder)
    config = read_config(folder)
    config["num_features"] = int(getattr(model, "num_features", 0) or 0)
    if information.class_names is not None:
        config["label_names"] = list(information.class_names)
    write_config(folder, config)


def card(model: nn.Module, information: ModelInformation, origin: Mapping[str, str]) -> str:
    """A model card without measurements; `ltm compress` writes one with them."""
    done, summary = conversion_of(model), report(model)
    front = {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "token-merging", done.config.name],
        **origin,
    }
    lines = ["---"]
    for name, value in front.items():
        entries = "".join(f"\n- {entry}" for entry in value) if isinstance(value, list) else ""
        lines.append(f"{name}:{entries or f' {value}'}")
    size = " x ".join(str(side) for side in information.spec.size)
    cost = f"{summary.macs_after / 1e9:.3f} of {summary.macs_before / 1e9:.3f} GMACs"
    number = int(getattr(model, "num_classes", 0) or 0)
    classes = f"{number} classes" if information.class_names is None else f"{number} named classes"
    lines += [
        "---",
        f"# {information.model} with token merging ({done.config.name})",
        "",
        f"{cost} ({summary.share:.3f}) at {size}, {classes}.",
        "",
        "```python",
        "from ltm.deployment.hub import load_from_hub",
        "",
        'model = load_from_hub("<this repository>")',
        "```",
        "",
        "The network without merging, by timm alone:",
        '`timm.create_model("hf-hub:<this repository>", pretrained=True, pretrained_strict=False)`',
        "",
        "```",
        str(summary),
        "```",
    ]
    return "\n".join(lines) + "\n"


def push_to_hub(
    model: nn.Module,
    repository: str,
    *,
    class_names: Sequence[str] | None = None,
    origin: Mapping[str, str] | None = None,
    private: bool = True,
    token: str | None = None,
    message: str = "Add model",
) -> str:
    """Upload a converted model and return its address; a missing repository is created.

    `token` is by default the one that `hf auth login` keeps.
    """
    hub = require("huggingface_hub")
    api: Any = hub.HfApi(token=token, library_name="ltm")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare_folder(model, folder, class_names=class_names, origin=origin)
        made = api.create_repo(repository, private=private, exist_ok=True)
        if api.file_exists(made.repo_id, _CARD):
            (folder / _CARD).unlink()  # The repository's own card is kept.
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
    return str(made)


def load_from_hub(
    repository: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    model: nn.Module | None = None,
) -> nn.Module:
    """Download a model that `push_to_hub` uploaded. Only its two files are read, nothing unpickled.

    `model` is the network to load into, if timm cannot make it.
    """
    hub = require("huggingface_hub")
    folder = hub.snapshot_download(
        repository, revision=revision, token=token, allow_patterns=[CONFIG, WEIGHTS]
    )
    return load(folder, model)
