"""A saved folder is data. All of this was tried on 0.1.0; each test says what it did."""

import json
import socket
from pathlib import Path
from random import Random

import pytest
import timm
import torch

import ltm
import within
from ltm.methods import methods


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small timm network that merges; all tests change copies of it."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5)
    ltm.merge_tokens_(model, ltm.ToMe(per_block=0.7))
    return ltm.save(model, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    """A copy of it as 0.1.0 wrote it, without checksums; loading it may not use the network."""

    def refuse(*_: object) -> None:
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path, lambda config: config.pop("checksums", None))
    return tmp_path


def change(folder: Path, edit) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "arguments",
    [
        {"pretrained": True},
        {"pretrained": "yes"},
        {"pretrained_cfg": "augreg"},
        {"pretrained_cfg_overlay": {"url": "http://localhost/weights"}},
        {"checkpoint_path": "/etc/hostname"},
        {"cache_dir": "/elsewhere"},
        {"features_only": True},
    ],
    ids=str,
)
def test_model_args_load_nothing(folder, arguments):
    """0.1.0 gave them to timm, which started a download or read the file."""
    change(folder, lambda config: config["model_args"].update(arguments))
    with pytest.raises(ValueError, match=f"config.json: model_args: {next(iter(arguments))} is no"):
        ltm.load(folder)


def test_addresses_in_the_description_of_images_are_not_kept(folder):
    """0.1.0 put them on the network, where timm's own functions follow them."""
    places = {"url": "http://localhost/a", "hf_hub_id": "some/body", "file": "/etc/hostname"}
    change(folder, lambda config: config["pretrained_cfg"].update(places, custom_load=True))
    model = ltm.load(folder)
    assert not set(places.values()) & {str(value) for value in model.pretrained_cfg.values()}
    assert not model.pretrained_cfg.get("custom_load")


@pytest.mark.parametrize(
    "name", ["local-dir:{}", "hf-hub:some/body", "hf_hub:a/b", "{}", "../test_vit", "test_vit/", ""]
)
def test_an_architecture_is_a_name_of_timm(folder, name):
    """0.1.0 opened the folder, or asked the hub."""
    change(folder, lambda config: config.update(architecture=name.format(folder)))
    with pytest.raises(ValueError, match=r"config\.json: architecture is .* no network of timm"):
        ltm.load(folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("pretrained", True, "'pretrained' is no known entry"),
        ("auto_map", {"AutoModel": "code.Net"}, "'auto_map' is no known entry"),
        ("architecture", 7, "architecture is 7; it must be str"),
        ("num_classes", "5", "num_classes is '5'; it must be a whole number"),
        ("model_args", [], "model_args is .*; it must be a group of entries"),
        ("model_args.depth", 10**9, "model_args: depth is 1000000000"),
        ("model_args.depth", 10**5, "has more layers than its weights"),
        ("num_classes", 10**6, "more than its weights hold"),
        ("model_args.img_size", 10**5, "more than its weights hold|cannot make"),
        ("model_args.qkv_bias", {"a": 1}, "model_args: qkv_bias is"),
        ("model_args.no_such", 1, "timm cannot make test_vit"),
        ("pretrained_cfg.input_size", [3, "160"], "pretrained_cfg.input_size is"),
        ("pretrained_cfg.mean", 0.5, "pretrained_cfg.mean is 0.5"),
        ("pretrained_cfg.weights", "x", "pretrained_cfg.'weights' is no known entry"),
        ("token_merging", [], "token_merging is .*; it must be a group of entries"),
        ("token_merging.method", ["tome"], "method: got"),
        ("token_merging.ratio", "x", "config.json: "),
        ("token_merging.pickle", "x", "tome has no setting pickle"),
        ("token_merging.image_size", 160, "token_merging.image_size is 160"),
        ("token_merging.image_size", [10**9, 10**9], "image_size is"),
        ("token_merging.blocks", None, "token_merging.blocks is None"),
        ("token_merging.token_counts", [[1, 2, 3]], "token_merging.token_counts is"),
        ("token_merging.token_counts", [1], "config.json: "),
        ("token_merging.active", [True], "config.json: "),
        ("token_merging.frozen", "no", "token_merging.frozen is 'no'"),
        ("token_merging.macs_after", 10**400, "token_merging.macs_after is"),
        ("label_names", "cat", "label_names is 'cat'"),
    ],
)
def test_entries_have_known_names_and_types(folder, path, value, message):
    """0.1.0 ignored some, and failed on others with whatever timm, torch or Python raised.

    At a depth of 1,000,000,000 it made blocks until there was no memory left.
    """

    def edit(config):
        *parents, name = path.split(".")
        for parent in parents:
            config = config[parent]
        config[name] = value

    change(folder, edit)
    with (
        within.seconds(20),
        within.one_more_gigabyte(),
        pytest.raises(ValueError, match=message) as caught,
    ):
        ltm.load(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", "7", "[" * 100_000, '{"a": 1' + "0" * 5000]
)
def test_what_is_no_description_is_refused(folder, text):
    """0.1.0 ended in TypeError and RecursionError."""
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        ltm.load(folder)


def test_entries_of_timm_and_transformers_are_known(folder):
    added = {
        "num_features": 64,
        "global_pool": "token",
        "model_type": "timm_wrapper",
        "architectures": ["TimmWrapperForImageClassification"],
        "transformers_version": "5.0.0",
        "torch_dtype": "float32",
        "initializer_range": 0.02,
        "do_pooling": True,
        "label_names": list("abcde"),
        "label_descriptions": dict.fromkeys("abcde", "a letter"),
    }
    change(folder, lambda config: config.update(added))
    assert ltm.token_counts(ltm.load(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_bit_is_found(saved, tmp_path, name):
    """0.1.0 loaded 49 of 299 such folders, and gave other predictions."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    good, random = (saved / name).read_bytes(), Random(0)
    for _ in range(60):
        data = bytearray(good)
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        (tmp_path / name).write_bytes(data)
        try:
            config = json.loads((tmp_path / "config.json").read_text())
        except ValueError:
            config = None
        if name == "config.json" and config == json.loads(good):
            continue  # white space
        with pytest.raises(ValueError, match=r"config\.json|model\.safetensors"):
            ltm.load(tmp_path)


def test_an_edited_folder_loads_where_it_is_said(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path, lambda config: config.update(label_names=list("abcde")))
    with pytest.raises(ValueError, match=r"config\.json is not as it was saved.* verify off"):
        ltm.load(tmp_path)
    with torch.no_grad():
        images = torch.rand(1, 3, 160, 160)
        expected = ltm.load(saved)(images)
        assert torch.equal(ltm.load(tmp_path, verify=False)(images), expected)
        source = ltm.ModelSource(run=tmp_path, verify=False)
        assert torch.equal(source.load()(images), expected)


@pytest.mark.parametrize("name", sorted(methods()))
def test_all_methods_are_saved_with_known_entries(name, tmp_path):
    model = timm.create_model("test_vit", num_classes=5)
    ltm.merge_tokens_(model, methods()[name](per_block=0.8))
    again = ltm.load(ltm.save(model, tmp_path))
    assert ltm.token_counts(again) == ltm.token_counts(model)
    assert "checksums" in json.loads((tmp_path / "config.json").read_text())


def test_arguments_that_would_read_a_file_are_not_saved(tmp_path):
    """0.1.0 wrote `checkpoint_path` into the folder, and read that file on loading."""
    model = timm.create_model("test_vit", num_classes=5)
    # What `remember_arguments` notes, which stands elsewhere in 0.1.0.
    model.made_with = {"checkpoint_path": str(tmp_path / "gone.pth"), "depth": 6}
    ltm.merge_tokens_(model, ltm.ToMe(per_block=0.7))
    arguments = json.loads((ltm.save(model, tmp_path) / "config.json").read_text())["model_args"]
    assert arguments["depth"] == 6
    assert "checkpoint_path" not in arguments
