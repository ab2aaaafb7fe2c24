"""Formats of what we write ourselves: saved networks and detectors, checkpoints, settings."""

from pathlib import Path

import pytest
import timm
import torch

import ltm
from fuzz.formats import Format
from fuzz.mutations import mutate_json, mutate_text
from ltm.api.saving import remember_arguments
from ltm.detection.saving import load_detector, save_detector
from ltm.detection.ssdlite import SSDLiteConfig
from ltm.training.checkpoint import Checkpoint, Checkpoints
from ltm.training.settings import TrainSettings, read_settings, to_yaml
from ltm.training.task import EpochRow

_ARGUMENTS = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def _make_network(folder: Path, *, frozen: bool = False) -> Path:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3, **_ARGUMENTS)
    support = ltm.Learned() if frozen else ltm.Matched()
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.7, support=support), 32)
    ltm.collect_statistics_(model, [torch.rand(3, 3, 32, 32)])
    if frozen:
        ltm.freeze_(model)
    return ltm.save(remember_arguments(model, _ARGUMENTS), folder) / "config.json"


def _read_edited(path: Path) -> object:
    return ltm.load(path.parent, verify=False)


def _read_verified(path: Path) -> object:
    """What loads gives what was saved."""
    counts = ltm.token_counts(ltm.load(path.parent))
    assert counts == [12, 9], counts
    return counts


def _make_detector(folder: Path) -> Path:
    torch.manual_seed(0)
    config = SSDLiteConfig(
        backbone="efficientvit_b0",
        num_classes=2,
        image_size=(64, 64),
        merging=ltm.LTM(per_block=0.7),
    )
    labels = {"class_names": ["cat", "dog"], "category_ids": [17, 18]}
    return save_detector(config.build(), config, folder, **labels) / "config.json"


def _make_transformers(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.ViTConfig(
        **sizes, intermediate_size=32, image_size=32, patch_size=8, num_labels=3
    )
    model = transformers.ViTForImageClassification(config).eval()
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.7), 32)
    return ltm.save(model, folder) / "config.json"


def _make_manifest(folder: Path) -> Path:
    checkpoints = Checkpoints(folder)
    for epoch in (1, 2):
        rows = [
            EpochRow(epoch=at + 1, merging=True, lr=0.1, noise=0.0, train_loss=1.0)
            for at in range(epoch)
        ]
        written = checkpoints.save(
            epoch=epoch,
            tensors={"weights": {"a": torch.ones(3)}},
            state={"optimizer": {"step": torch.ones(1)}, "updates": epoch, "precision": {}},
            score=0.5,
            history=[vars(row) for row in rows],
            settings=to_yaml(TrainSettings()),
        )
    return written / "manifest.json"


def _read_manifest(path: Path) -> object:
    """The checkpoint or the one before, never none, and its rows can be used."""
    checkpoints = Checkpoints(path.parent.parent, row_type=EpochRow)
    found = checkpoints.latest()
    assert found is not None
    assert checkpoints.best() is not None
    rows = [EpochRow(**row) for row in found.history]
    return rows, found.state(), found.weights()


def _read_state(path: Path) -> object:
    return Checkpoint(folder=path.parent, epoch=2, score=None, history=[]).state()


def _make_settings(folder: Path) -> Path:
    (folder / "config.yaml").write_text(to_yaml(TrainSettings()))
    return folder / "config.yaml"


def _beside(name: str, path: Path) -> Path:
    return path.with_name(name)


SAVED = (
    Format(name="network", make=_make_network, read=_read_edited, mutate=mutate_json),
    Format(name="network-verified", make=_make_network, read=_read_verified),
    Format(
        name="network-weights",
        make=lambda folder: _beside("model.safetensors", _make_network(folder)),
        read=_read_edited,
    ),
    Format(
        name="frozen-weights",
        make=lambda folder: _beside("model.safetensors", _make_network(folder, frozen=True)),
        read=_read_edited,
    ),
    Format(
        name="detector",
        make=_make_detector,
        read=lambda path: load_detector(path.parent, verify=False),
        mutate=mutate_json,
        share=0.25,
    ),
    Format(
        name="detector-weights",
        make=lambda folder: _beside("model.safetensors", _make_detector(folder)),
        read=lambda path: load_detector(path.parent, verify=False),
        share=0.25,
    ),
    Format(
        name="transformers",
        make=_make_transformers,
        read=_read_edited,
        mutate=mutate_json,
        share=0.5,
    ),
    Format(
        name="transformers-weights",
        make=lambda folder: _beside("model.safetensors", _make_transformers(folder)),
        read=_read_edited,
        share=0.5,
    ),
    Format(name="manifest", make=_make_manifest, read=_read_manifest, mutate=mutate_json),
    Format(
        name="state",
        make=lambda folder: _beside("state.pt", _make_manifest(folder)),
        read=_read_state,
    ),
    Format(
        name="settings",
        make=_make_settings,
        read=lambda path: read_settings(path, TrainSettings()),
        mutate=mutate_text,
    ),
)
