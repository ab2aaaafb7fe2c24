"""Detectors survive being saved."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch

import ltm
from ltm.api import conversion_of, image_size_of, merging_network
from ltm.detection.mask_rcnn import MaskRCNNConfig
from ltm.detection.pyramid import DetectorConfig
from ltm.detection.saving import load_detector, save_detector
from ltm.detection.ssdlite import SSDLiteConfig
from ltm.methods import LTM, Learned, Matched

pytestmark = pytest.mark.slow

MERGING = LTM(per_block=0.5, support=Learned())
CONFIGS = {
    "ssdlite": SSDLiteConfig(backbone="mobilevit_xxs", num_classes=2, image_size=(64, 64)),
    "ssdlite_ltm": SSDLiteConfig(
        backbone="mobilevit_xxs", num_classes=2, image_size=(64, 64), merging=MERGING, restore=False
    ),
    "mask_rcnn_ltm": MaskRCNNConfig(
        backbone="efficientvit_b0", num_classes=2, image_size=(64, 96), merging=MERGING, width=32
    ),
}
CATEGORIES = {"class_names": ("cat", "dog"), "category_ids": (17, 18)}


def same_outputs(
    one: torch.nn.Module, other: torch.nn.Module, size: tuple[int, int] = (64, 96)
) -> bool:
    images = torch.rand(2, 3, *size)
    with torch.no_grad():
        maps: list[Any] = [cast("Any", model.eval()).backbone(images) for model in (one, other)]
    return all(torch.equal(maps[0][name], maps[1][name]) for name in maps[0])


def network_in(model: torch.nn.Module) -> torch.nn.Module:
    network = merging_network(model)
    assert network is not None
    return network


def train_a_step_(model: torch.nn.Module) -> None:
    images = list(torch.rand(2, 3, 64, 64))
    targets = [
        {"boxes": torch.tensor([[8.0, 8.0, 40.0, 48.0]]), "labels": torch.tensor([1])}
        for _ in images
    ]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses: dict[str, torch.Tensor] = model.train()(images, targets)
    torch.stack(list(losses.values())).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_detector_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    config: DetectorConfig = CONFIGS[name]
    model = config.build()
    save_detector(model, config, tmp_path, **CATEGORIES)
    loaded = load_detector(tmp_path)
    assert loaded.config == config
    assert (loaded.class_names, loaded.category_ids) == (("cat", "dog"), (17, 18))
    assert not loaded.model.training
    assert same_outputs(model, loaded.model)
    # Again, now that it was loaded.
    save_detector(loaded.model, loaded.config, tmp_path / "again", **CATEGORIES)
    assert same_outputs(model, load_detector(tmp_path / "again").model)


def test_a_detector_on_a_saved_network_needs_it_no_more(tmp_path: Path) -> None:
    classifier = timm.create_model("efficientvit_b0", num_classes=4)
    classifier.pretrained_cfg = {**classifier.pretrained_cfg, "mean": (0.1, 0.2, 0.3)}
    ltm.merge_tokens_(classifier, MERGING, image_size=64)
    network = ltm.save(classifier, tmp_path / "network")
    config = SSDLiteConfig(backbone=str(network), num_classes=2, image_size=(64, 64))
    model = config.build()
    assert model.transform.image_mean == [0.1, 0.2, 0.3]
    save_detector(model, config, tmp_path / "detector", **CATEGORIES)
    for file in network.iterdir():
        file.unlink()
    network.rmdir()
    loaded = load_detector(tmp_path / "detector")
    assert loaded.model.transform.image_mean == [0.1, 0.2, 0.3]
    assert same_outputs(model, loaded.model)
    save_detector(loaded.model, loaded.config, tmp_path / "again", **CATEGORIES)
    assert same_outputs(model, load_detector(tmp_path / "again").model)


@pytest.mark.parametrize(
    ("backbone", "merging", "informed"),
    [
        ("efficientvit_b0", MERGING, False),
        ("efficientvit_b0", MERGING, True),
        ("efficientvit_b0", LTM(per_block=0.5, support=Learned(scope="batch")), True),
        ("mobilevit_xxs", LTM(per_block=0.5, support=Matched()), False),
        ("mobilevit_xxs", LTM(per_block=0.5, support=Matched()), True),
        ("deit_tiny_patch16_224", LTM(per_block=0.8, support=Learned()), False),
    ],
)
def test_a_detector_on_a_frozen_network_comes_back(
    backbone: str, merging: LTM, informed: bool, tmp_path: Path
) -> None:
    classifier = timm.create_model(backbone, num_classes=4)
    size = image_size_of(classifier) if backbone.startswith("deit") else (64, 64)
    ltm.merge_tokens_(classifier, merging, image_size=size)
    if informed:
        ltm.collect_statistics_(classifier, [torch.rand(4, 3, *size)])
        classifier.train()(torch.rand(4, 3, *size))
    network = ltm.save(ltm.freeze_(classifier), tmp_path / "network")
    config = SSDLiteConfig(backbone=str(network), num_classes=2, image_size=size)
    model = config.build()
    train_a_step_(model)
    save_detector(model, config, tmp_path / "detector", **CATEGORIES)
    loaded = load_detector(tmp_path / "detector")
    assert same_outputs(model, loaded.model, size)
    was, now = (conversion_of(network_in(m)) for m in (model, loaded.model))
    assert now.frozen
    assert (was.macs_before, was.macs_after) == (now.macs_before, now.macs_after)
    save_detector(loaded.model, loaded.config, tmp_path / "again", **CATEGORIES)
    assert same_outputs(model, load_detector(tmp_path / "again").model, size)


def test_a_detector_that_was_frozen_itself_comes_back(tmp_path: Path) -> None:
    config = CONFIGS["ssdlite_ltm"]
    model = config.build()
    ltm.freeze_(network_in(model))
    save_detector(model, config, tmp_path, **CATEGORIES)
    loaded = load_detector(tmp_path)
    assert conversion_of(network_in(loaded.model)).frozen
    assert same_outputs(model, loaded.model, config.image_size)


def test_a_folder_that_does_not_say_whether_it_is_frozen_still_loads(tmp_path: Path) -> None:
    config = CONFIGS["ssdlite_ltm"]
    model = config.build()
    save_detector(model, config, tmp_path, **CATEGORIES)
    description = json.loads((tmp_path / "config.json").read_text())
    del description["token_merging"]["frozen"]
    (tmp_path / "config.json").write_text(json.dumps(description))
    loaded = load_detector(tmp_path, verify=False)
    assert not conversion_of(network_in(loaded.model)).frozen
    assert same_outputs(model, loaded.model)


def test_what_is_no_detector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json"):
        load_detector(tmp_path)
    config = CONFIGS["ssdlite"]
    save_detector(config.build(), config, tmp_path, **CATEGORIES)
    description = json.loads((tmp_path / "config.json").read_text())
    description["detector"]["num_classes"] = 5
    (tmp_path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="weights do not fit the detector"):
        load_detector(tmp_path, verify=False)
    for text, message in (
        ("{", "is not readable JSON"),
        ('{"task": "x"}', "describes no detector"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_detector(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("detector.backbone", "{}", "architecture is"),
        ("detector.backbone", "hf-hub:some/body", "architecture is"),
        ("detector.backbone", "local-dir:{}", "architecture is"),
        ("detector.pretrained", True, "detector.pretrained is True; it must be False"),
        ("detector.weights", "/etc/hostname", "detector.weights is"),
        ("detector.num_classes", 10**9, "it has 2 categories, but num_classes is"),
        ("detector.image_size", [10**6, 10**6], "image_size is"),
        ("detector.unheard", 1, "'unheard' is no known entry"),
        ("host", {"architecture": "local-dir:{}", "model_args": {}}, "architecture is"),
        (
            "host",
            {"architecture": "efficientvit_b0", "model_args": {"pretrained": True}},
            "model_args: pretrained is no",
        ),
        ("categories", [{"name": "cat"}], "categories lacks id"),
        ("token_merging", {"active": []}, "token_merging lacks"),
        ("task", ["ssdlite"], "task is"),
    ],
    ids=str,
)
def test_a_detectors_folder_is_data(path: str, value: Any, message: str, tmp_path: Path) -> None:
    """0.1.0 opened the other folder, started a download, or ended in KeyError or TypeError."""
    config = CONFIGS["ssdlite"]
    save_detector(config.build(), config, tmp_path, **CATEGORIES)
    file = tmp_path / "config.json"
    description = json.loads(file.read_text())
    description.pop("checksums", None)
    *parents, name = path.split(".")
    place = description
    for parent in parents:
        place = place[parent]
    place[name] = value
    file.write_text(
        json.dumps(description).replace(': "{}', f': "{tmp_path}').replace(":{}", f":{tmp_path}")
    )
    with pytest.raises(ValueError, match=message) as caught:
        load_detector(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_changed_bit_of_a_detector_is_found(tmp_path: Path) -> None:
    """0.1.0 loaded it."""
    config = CONFIGS["ssdlite"]
    save_detector(config.build(), config, tmp_path, **CATEGORIES)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="has damaged weights"):
        load_detector(tmp_path)
    load_detector(tmp_path, verify=False)
