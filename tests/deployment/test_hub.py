"""The Hugging Face layout: timm reads it, ltm reads it, and the upload is what it should be."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from torch import nn

import ltm
from ltm.deployment.hub import load_from_hub, prepare_folder, push_to_hub

CLASSES = ("cat", "dog", "bird")
# Counts need no search for a budget.
TOME = ltm.ToMe(counts=(12, 9), sites=(4, 8))
MATCHED = ltm.LTM(counts=(12, 9), sites=(4, 8))
LEARNED = ltm.LTM(counts=(12, 9), sites=(4, 8), support=ltm.Learned())


def converted(config: ltm.LTM | ltm.ToMe) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3).eval()
    ltm.merge_tokens_(model, config)
    return model


@pytest.mark.parametrize(
    ("config", "strict"),
    [(TOME, True), (MATCHED, True), (LEARNED, False)],
)
def test_timm_loads_the_network_and_ltm_loads_it_merging(
    config: ltm.LTM | ltm.ToMe, strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = converted(config)
    folder = prepare_folder(model, tmp_path, class_names=CLASSES)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    images = torch.randn(2, 3, 64, 64)
    host = timm.create_model(f"local-dir:{folder}", pretrained=True, pretrained_strict=strict)
    known: Any = host.pretrained_cfg
    assert known["label_names"] == list(CLASSES)
    again = ltm.load(folder)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
        ltm.unmerge_tokens_(model)
        assert torch.equal(host.eval()(images), model(images))
    known = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    assert not {"url", "hf_hub_id"} & set(known), "loaders would follow them to other weights"


@torch.no_grad()
def test_transformers_loads_the_network(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, images = converted(MATCHED), torch.randn(2, 3, 64, 64)
    folder = ltm.save(model, tmp_path, class_names=CLASSES)
    host = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    ltm.unmerge_tokens_(model)
    assert torch.equal(host(images).logits, model(images))
    assert host.config.id2label == dict(enumerate(CLASSES))


def test_the_card_says_what_is_known_and_is_kept(tmp_path: Path) -> None:
    model = converted(TOME)
    prepare_folder(model, tmp_path, origin={"license": "mit", "base_model": "timm/vit_tiny"})
    text = (tmp_path / "README.md").read_text()
    front = text.split("---")[1]
    assert "license: mit" in front
    assert "tags:\n- image-classification" in front
    assert "GMACs" in text
    (tmp_path / "README.md").write_text("my own words")
    prepare_folder(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own words"


def test_the_card_says_how_many_classes_there_are(tmp_path: Path) -> None:
    model = converted(TOME)
    for names, said in ((None, ", 3 classes."), (CLASSES, ", 3 named classes.")):
        folder = prepare_folder(model, tmp_path / str(names is None), class_names=names)
        assert said in (folder / "README.md").read_text()


class Repository:
    """What the hub's client returns for a repository: it prints as its address."""

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id

    def __str__(self) -> str:
        return f"https://hub.test/{self.repo_id}"


class Hub:
    """The hub's side, at the boundary of its own client."""

    def __init__(self, has_card: bool) -> None:
        self.has_card = has_card
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, **arguments: Any) -> "Hub":
        self.calls.append(("api", arguments))
        return self

    def create_repo(self, repository: str, **arguments: Any) -> Any:
        self.calls.append(("create", arguments))

        return Repository(f"somebody/{repository}")

    def file_exists(self, repository: str, name: str) -> bool:
        assert (repository, name) == ("somebody/small", "README.md")
        return self.has_card

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        assert repo_id == "somebody/small"
        self.files = {p.name: p.read_bytes() for p in Path(folder_path).iterdir()}


@pytest.mark.parametrize("has_card", [False, True])
@pytest.mark.slow
def test_what_is_uploaded_can_be_downloaded(
    has_card: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(has_card)
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    model = converted(TOME)
    address = push_to_hub(model, "small", class_names=CLASSES, token="secret")
    assert address == "https://hub.test/somebody/small"
    assert ("create", {"private": True, "exist_ok": True}) in hub.calls
    assert ("README.md" in hub.files) is not has_card
    for name, content in hub.files.items():
        assert b"secret" not in content
        (tmp_path / name).write_bytes(content)

    def download(repository: str, **arguments: Any) -> str:
        assert repository == "somebody/small"
        assert arguments["allow_patterns"] == ["config.json", "model.safetensors"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(load_from_hub("somebody/small")(images), model(images))


def test_only_converted_models_are_uploaded(tmp_path: Path) -> None:
    plain = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
    with pytest.raises(ValueError, match="merges no tokens"):
        prepare_folder(plain, tmp_path, class_names=CLASSES)
    assert not list(tmp_path.iterdir())
