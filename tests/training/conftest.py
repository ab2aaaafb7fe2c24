"""Runs that take seconds: a few generated images, networks of a few thousand parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ltm.models import changed
from ltm.training.settings import TrainSettings

VIT = ["img_size=32", "patch_size=8", "embed_dim=16", "depth=3", "num_heads=2"]
MERGING = ["support=learned", "sites=[1,2]", "counts=[12,9]"]


def tiny_values(**groups: dict[str, Any]) -> dict[str, Any]:
    """Settings of a tiny run as plain values; groups are merged into the defaults."""
    values: dict[str, dict[str, Any]] = {
        "model": {"name": "vit_tiny_patch16_224", "model_args": VIT},
        "merge": {"method_options": MERGING},
        "data": {
            "source": "shapes:classes=3,size=32,images=48,val_images=18",
            "batch_size": 12,
            "workers": 0,
        },
        "augment": {
            "scale": [0.6, 1.0],
            "auto_augment": None,
            "color_jitter": 0.0,
            "erase": 0.0,
            "mixup": 0.0,
            "cutmix": 0.0,
            "smoothing": 0.0,
        },
        "optim": {"epochs": 2, "lr": 1e-3},
        "run": {"device": "cpu"},
    }
    for group, changes in groups.items():
        values[group] = values.get(group, {}) | changes
    return values


@pytest.fixture
def tiny() -> Callable[..., TrainSettings]:
    """Make the settings of a tiny run."""
    return lambda **groups: changed(TrainSettings(), tiny_values(**groups))


@pytest.fixture
def tiny_file(tmp_path: Path) -> Callable[..., Path]:
    """Write the settings of a tiny run to a YAML file."""
    import yaml

    def write(**groups: dict[str, Any]) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(tiny_values(**groups)))
        return path

    return write
