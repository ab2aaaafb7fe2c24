"""From options to a model: what works, and what is said where it cannot."""

import pickle
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file

import ltm
from ltm.api import image_size_of, pretrained
from ltm.data.transforms import image_spec
from ltm.models import ModelSource, check_classes, method_config, read_weights, split_methods


def load_model(
    model: str | None = None, *, untrained: bool = False, merges: bool = False, **source: Any
) -> Any:
    return ModelSource(model=model, **source).load(untrained=untrained, merges=merges)


@pytest.fixture(scope="module")
def host() -> Any:
    torch.manual_seed(3)
    return timm.create_model("test_vit", num_classes=3).eval()


@pytest.fixture(scope="module")
def weights(host: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half precision, as weights are often stored."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({name: value.half() for name, value in host.state_dict().items()}, path)
    return path


def test_half_precision_weights_are_loaded_strictly_in_float32(host: Any, weights: Path) -> None:
    model = load_model("test_vit", weights=weights)
    assert not model.training
    assert model.num_classes == 3  # as many as the weights have
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, host.state_dict()[name].half().float())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "state_dict_ema"])
def test_checkpoints_of_others_are_unwrapped(
    wrapper: str | None, prefix: str, host: Any, tmp_path: Path
) -> None:
    state = {f"{prefix}{name}": value for name, value in host.state_dict().items()}
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 3}, tmp_path / "a.pth")
    model = load_model("test_vit", weights=tmp_path / "a.pth")
    assert all(torch.equal(v, host.state_dict()[k]) for k, v in model.state_dict().items())


def test_only_the_beginning_of_a_name_is_unwrapped(tmp_path: Path) -> None:
    """EfficientViT has a `context_module.` in the middle, without which no weights of it fit."""
    names = ("module.stages.0.context_module.main.weight", "a._orig_mod.b", "my_module.c")
    save_file({name: torch.ones(1) for name in names}, tmp_path / "a.safetensors")
    found = read_weights(tmp_path / "a.safetensors")
    assert set(found) == {"stages.0.context_module.main.weight", *names[1:]}


class Malicious:
    """Would make a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path, victim = tmp_path / "a.pth", tmp_path / "touched"
    torch.save({"state_dict": Malicious(victim)}, path)
    with pytest.raises(ValueError, match=r"cannot be read: .* more than tensors") as stop:
        read_weights(path)
    assert "trust" not in str(stop.value), "torch advises to unpickle it all the same"
    path.write_bytes(pickle.dumps(Malicious(victim)))
    with pytest.raises(ValueError, match="cannot be read"):
        read_weights(path)
    assert not victim.exists()


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "a.pt"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", bytes(200)])
def test_damaged_weights_are_one_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"^weights .* cannot be read") as stop:
        read_weights(tmp_path / name)
    assert "\n" not in str(stop.value)


def test_truncated_weights_are_damaged(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="cannot be read"):
        read_weights(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "give a timm name with --model, or a saved run"),
        ({"model": "test_vit"}, "has no weights yet: give --pretrained or --weights"),
        (
            {"model": "vit_tiny_patch16_244", "untrained": True},
            "vit_tiny_patch16_244 is not known to timm; did you mean vit_tiny_patch16_224",
        ),
        ({"model": "qqqqqqqq", "untrained": True}, "is not known to timm"),
        ({"model": "vit_tinny"}, "not known to timm; did you mean vit_tiny_patch16_224, vit_tiny_"),
        ({"model": "convnext_tiny", "merges": True}, "ConvNeXt has no block that can merge"),
        ({"model": "convnext_tiny"}, "has no weights yet"),
        ({"model": "coat_tiny", "merges": True}, "CoaT has no block that can merge"),
        (
            {"model": "vit_tiny_patch16_224", "image_size": 225, "weights": Path("no.pth")},
            "--image-size is 225: it must be a multiple of 16, the side of this network's patches",
        ),
        ({"model": "test_vit", "image_size": 0}, "image_size is 0, but must be at least 1"),
        ({"run": Path("nowhere"), "image_size": -5}, "image_size is -5, but must be at least 1"),
        (
            {"model": "test_vit.nothing", "untrained": True},
            "cannot be made: Invalid pretrained tag",
        ),
        ({"model": "test_vit", "pretrained": True, "weights": "W"}, "give one of them"),
        ({"model": "test_vit", "weights": "W", "num_classes": 9}, "are for 3 classes, but 9"),
        ({"model": "test_vit2", "weights": "W"}, "do not fit test_vit2: .* and .* more"),
        ({"model": "test_vit", "weights": Path("no.pth")}, "no.pth: there is no such file"),
        ({"model": "test_vit", "weights": Path(__file__)}, "must end in one of .safetensors"),
        ({"run": Path("nowhere")}, "nowhere: there is no such folder"),
        ({"run": Path(), "image_size": 96}, "--image-size: a saved run has its own; leave it"),
        ({"run": Path(), "num_classes": 9}, "--num-classes: a saved run has its own"),
        ({"run": Path(), "model_args": ("depth=2",)}, "--model-args: a saved run has its own"),
        ({"run": Path(), "model": "test_vit", "weights": "W"}, "--weights: a saved run has"),
        ({"run": Path(), "pretrained": True}, "--pretrained: a saved run has its own"),
        ({"model": "test_vit", "untrained": True, "model_args": ["wings=2"]}, "does not take"),
        ({"model": "test_vit", "untrained": True, "model_args": ["wings"]}, "write name=value"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(
    options: dict[str, Any], sentence: str, weights: Path
) -> None:
    options = {name: weights if value == "W" else value for name, value in options.items()}
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as stop:
        load_model(**options)
    assert "\n" not in str(stop.value)


def test_pretrained_weights_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host\nat all")

    monkeypatch.setattr(timm, "create_model", fail)
    monkeypatch.setattr(pretrained, "reaching_hub", lambda: nullcontext(""))
    with pytest.raises(ValueError, match=r"could not be fetched \(no route to host\): check"):
        load_model("test_vit", pretrained=True)


def test_without_a_network_nothing_is_fetched_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    session = SimpleNamespace(head=refuse, request=refuse)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"could not be fetched \(https://.* cannot be reached\)"):
        load_model("vit_tiny_patch16_224", pretrained=True)
    assert time.monotonic() - began < 10, "the hub's client tried again and again"
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_other_sizes(weights: Path, tmp_path: Path) -> None:
    images = torch.randn(1, 3, 96, 96)
    assert load_model("test_vit", weights=weights, image_size=96)(images).shape == (1, 3)
    small = timm.create_model("test_vit", num_classes=2, img_size=96)
    save_file(small.state_dict(), tmp_path / "small.safetensors")
    model = load_model("test_vit", weights=tmp_path / "small.safetensors", image_size=96).eval()
    torch.testing.assert_close(model(images), small.eval()(images))


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("test_vit", 160, []),  # its own
        ("test_vit", 100, ["dynamic_img_size=True", "dynamic_img_pad=True"]),
        ("swin_tiny_patch4_window7_224", 100, []),
        ("mobilevit_xxs", 100, []),
        ("resnet18", 33, []),
    ],
)
def test_sizes_that_work_are_taken(name: str, size: int, arguments: list[str]) -> None:
    model = load_model(name, untrained=True, image_size=size, model_args=arguments)
    with torch.no_grad():
        assert model(torch.randn(1, 3, size, size)).shape == (1, 1000)


def test_networks_of_any_size_note_theirs() -> None:
    model = load_model("mobilevit_xxs", untrained=True, image_size=192)
    assert image_size_of(model) == (192, 192)
    grey = load_model("mobilevit_xxs", untrained=True, image_size=64, model_args=("in_chans=1",))
    assert grey.pretrained_cfg["input_size"] == (1, 64, 64)
    assert image_spec(model=model).size == (192, 192)
    assert image_size_of(load_model("mobilevit_xxs", untrained=True)) == (256, 256)


def test_runs_are_loaded_as_they_were_saved(weights: Path, tmp_path: Path) -> None:
    model = load_model("test_vit", weights=weights)
    ltm.merge_tokens_(model, ltm.ToMe(ratio=0.8))
    ltm.save(model, tmp_path / "run")
    images = torch.randn(2, 3, 160, 160)
    assert torch.equal(load_model(run=tmp_path / "run")(images), model(images))
    (tmp_path / "run" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="has damaged weights"):
        load_model(run=tmp_path / "run")


@pytest.mark.slow
def test_model_args_and_names_of_ours() -> None:
    model: Any = load_model("test_vit", untrained=True, model_args=["depth=2", "num_heads=1"])
    assert len(model.blocks) == 2
    model = load_model("ltm_vit_small_patch16_224", untrained=True, model_args=["embed_dim=24"])
    assert ltm.token_counts(model)


def test_classes_of_data_must_be_those_of_the_model(host: Any) -> None:
    check_classes(host, ["cat", "dog", "eel"], "data")
    check_classes(host, ["0000", "0001"], "data")
    for names in (["cat", "dog"], list("abcd"), ["0", "1", "2", "3"], ["1", "2"]):
        with pytest.raises(
            ValueError, match=rf"data has {len(names)} classes, but the model has 3"
        ):
            check_classes(host, names, "data")
    with pytest.raises(ValueError, match="has no classes"):
        check_classes(torch.nn.Identity(), ["cat"], "data")


def test_methods_are_split_with_their_settings() -> None:
    assert split_methods(["tome,ltm", "tofu"]) == ["tome", "ltm", "tofu"]
    text = "tome,ltm:support=learned,sites=3+5,ltmp"
    assert split_methods([text]) == ["tome", "ltm:support=learned,sites=3+5", "ltmp"]


def test_methods_become_configs() -> None:
    assert method_config("tome", 0.6) == ltm.ToMe(ratio=0.6)
    static = ltm.LTM(ratio=0.7, support=ltm.Learned(), weights="uniform")
    assert method_config("ltm-static", 0.7) == static
    assert method_config("ltm-static:ratio=0.5", 0.7) == replace(static, ratio=0.5)
    config = method_config("ltm:per_block=0.9,sites=3+5,keep_norm=False,mask_form=letter", 0.7)
    assert config == ltm.LTM(per_block=0.9, sites=(3, 5), support=ltm.Learned(mask_form="letter"))
    assert method_config("ltm:sites=4", 0.7) == ltm.LTM(ratio=0.7, sites=(4,))
    assert method_config("ltm:counts=9,sites=4") == ltm.LTM(counts=(9,), sites=(4,))
    assert method_config("tome:counts=9+8") == ltm.ToMe(counts=(9, 8))
    assert method_config("ltm:sites=0,counts=7x5") == ltm.LTM(sites=(0,), counts=((7, 5),))
    assert method_config("ltm:counts=7x7+5x6") == ltm.LTM(counts=((7, 7), (5, 6)))
    assert method_config("tofu", 0.7, switch=0.25) == ltm.ToFu(ratio=0.7, switch=0.25)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ltm.LTM(ratio=0.7), "ltm:ratio=0.7"),
        (ltm.LTM(ratio=0.6), "ltm"),
        (ltm.ToMe(per_block=0.9), "tome:per_block=0.9"),
        (ltm.ToMe(counts=(9,), sites=(0,)), "tome:counts=9,sites=0"),
        (ltm.LTM(counts=((14, 14), (7, 5)), sites=(3, 5)), "ltm:counts=14x14+7x5,sites=3+5"),
        (
            ltm.LTM(support=ltm.Learned(), weights=None),
            "ltm:ratio=0.7,support=learned,weights=uniform",
        ),
        (
            ltm.LTM(ratio=0.6, sites=(3, 5), support=ltm.Matched(operators=("none", "merge"))),
            "ltm:sites=3+5,support=matching,operators=none+merge",
        ),
    ],
)
def test_a_config_says_itself_in_words_that_are_read_back(config: Any, words: str) -> None:
    assert config.words(ratio=0.6) == words
    assert method_config(words, ratio=0.6) == config
    assert method_config(config.words()) == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tomee", "method tomee is not known: choose from ltm, ltmp, tofu, tome, diffrate"),
        ("ltm:wings=2", "no setting wings"),
        ("ltm:support", "is no setting; write name=value"),
        ("ltm:ratio=3", "ratio"),
    ],
)
def test_bad_methods_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        method_config(text, 0.7)


def test_a_size_at_which_the_network_fails_is_one_sentence(monkeypatch):
    def fail(*_):
        raise RuntimeError("too small")

    monkeypatch.setattr("timm.models.swin_transformer.SwinTransformer.forward_features", fail)
    sentence = "--image-size is 64: this network cannot take it; leave it out, or give a multiple"
    with pytest.raises(ValueError, match=sentence):
        load_model("swin_tiny_patch4_window7_224", image_size=64, untrained=True)
