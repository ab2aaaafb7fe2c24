"""The networks that come with the package."""

from pathlib import Path

import pytest
import timm
import torch

import ltm
from ltm.data.config import DataConfig
from ltm.data.datasets import open_dataset
from ltm.data.transforms import evaluation_transform, image_spec
from ltm.models import open_model
from ltm.zoo import DEMO_CLASSES, DEMO_DATA, DEMO_MODELS, demo_weights


def test_weights_are_small() -> None:
    assert sum(demo_weights(name).stat().st_size for name in DEMO_MODELS) <= 8_000_000


@torch.no_grad()
@pytest.mark.slow
def test_the_demo_vit_names_shapes_that_it_has_not_seen() -> None:
    model = timm.create_model("demo_vit", pretrained=True).eval()
    transform = evaluation_transform(
        image_spec(DataConfig(source=DEMO_DATA), model), normalize=True
    )
    unseen = open_dataset(DEMO_DATA, split="test", transform=transform).take(DEMO_CLASSES)
    images, labels = zip(*(unseen[index] for index in range(len(unseen))), strict=True)
    found = model(torch.stack(images)).argmax(1)
    assert (found == torch.tensor(labels)).sum() >= DEMO_CLASSES - 1


def test_every_verb_finds_it_by_name() -> None:
    assert open_model("demo_vit", "cpu").num_classes == DEMO_CLASSES


def test_a_saved_copy_loads(tmp_path: Path) -> None:
    model = open_model("demo_vit", "cpu")
    ltm.merge_tokens_(model, ltm.ToMe(sites=(1,), counts=(9,)))
    ltm.save(model, tmp_path)
    assert ltm.token_counts(ltm.load(tmp_path)) == [9]
