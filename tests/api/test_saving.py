"""Freezing, saving and loading."""

import copy
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import ltm
from ltm.api import merging_off
from ltm.api.saving import fingerprint, remember_arguments
from ltm.methods import methods
from toys import TOYS, fits, pictures, size_of, toy

STATIC = ltm.LTM(per_block=0.6, support=ltm.Learned(), weights="uniform")


def prepared(name, config):
    model, images = toy(name), pictures(name)
    ltm.merge_tokens_(model, config, size_of(name))
    if config.to_dict().get("weights") == "informative" and name != "headless":
        ltm.collect_statistics_(model, [images])
    return model, images


CONFIGS = [
    *(method(per_block=0.6) for _, method in sorted(methods().items())),
    STATIC,
    ltm.LTM(per_block=0.6, support=ltm.Learned(scope="batch")),
]


def said(config):
    settings = config.to_dict()
    return "-".join(str(settings.get(key, "")) for key in ("method", "support", "scope"))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(config, name, id=f"{said(config)}-{name}")
        for config in CONFIGS
        for name in TOYS
        if fits(config, name)
    ],
)
def test_freezing_changes_no_output(name, config):
    model, images = prepared(name, config)
    with torch.no_grad():
        expected = model(images)
        ltm.freeze_(model)
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-4)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "merger" in n)


def test_a_network_that_timm_did_not_name_is_saved_by_its_own_class(tmp_path):
    """The folder named a class of ltm, and so did the error."""
    model, images = prepared("vit", STATIC)
    ltm.save(model, tmp_path)
    with pytest.raises(ValueError, match="architecture is 'VisionTransformer', no network of"):
        ltm.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(ltm.load(tmp_path, toy("vit"))(images), model(images))


@pytest.mark.parametrize("name", ["vit", "efficientvit"])
def test_nothing_that_was_never_set_is_saved(name, tmp_path):
    model = toy(name)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.6), size_of(name))
    kept = load_file(ltm.save(model, tmp_path) / "model.safetensors")
    assert not [key for key in kept if ".informative." in key]
    _, merger = next(ltm.api.mergers(model))
    with torch.no_grad():
        merger.informative.gain.fill_(0.3)
    kept = load_file(ltm.save(model, tmp_path) / "model.safetensors")
    assert next(key for key in kept if ".informative." in key).endswith("gain")
    again = ltm.load(tmp_path, toy(name))
    gains = [found.informative.gain.item() for _, found in ltm.api.mergers(again)]
    assert gains == pytest.approx([0.3] + [0.1] * (len(gains) - 1))


def test_nothing_is_frozen_while_merging_is_off():
    model, _ = prepared("vit", STATIC)
    with merging_off(model), pytest.raises(ValueError, match=r"merging is off \(merging_off\)"):
        ltm.freeze_(model)


@pytest.mark.parametrize("name", TOYS)
def test_a_frozen_static_mask_keeps_no_parameter(name):
    model, _ = prepared(name, STATIC)
    ltm.freeze_(model)
    assert not [n for n, _ in model.named_parameters() if "merger" in n]


def test_kernels_read_the_mask_that_was_loaded(tmp_path):
    model, _ = prepared("vit", STATIC)
    ltm.save(ltm.freeze_(model), tmp_path)
    again = ltm.load(tmp_path, toy("vit"))
    assert not [key for key in again.state_dict() if "who" in key or "share" in key]
    for (_, merger), (_, loaded) in zip(
        ltm.api.mergers(model), ltm.api.mergers(again), strict=True
    ):
        who, share = loaded.fixed_who.long(), loaded.fixed_share
        rows = torch.zeros_like(merger.fixed_matrix).scatter(1, who, share)
        assert torch.equal(rows, merger.fixed_matrix)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("config", CONFIGS, ids=said)
def test_loading_gives_the_same_bits(config, frozen, tmp_path):
    for name in ("vit", "swin", "mobilevit", "efficientvit"):
        if not fits(config, name):
            continue
        model, images = prepared(name, config)
        if frozen:
            ltm.freeze_(model)
        ltm.save(model, tmp_path / name)
        again = ltm.load(tmp_path / name, toy(name))
        with torch.no_grad():
            assert torch.equal(again(images), model(images)), name
        assert ltm.token_counts(again) == ltm.token_counts(model)
        assert again.token_merging.config == config


@pytest.mark.parametrize("name", ["vit", "swin", "efficientvit"])
@pytest.mark.parametrize("form", ["masked", "letter"])
def test_the_constants_of_a_trained_batch_mask_come_back(name, form, tmp_path):
    model, images = prepared(
        name, ltm.LTM(per_block=0.6, support=ltm.Learned(scope="batch", mask_form=form))
    )
    ltm.collect_statistics_(model, [(images, torch.arange(len(images)))])
    model.train()
    model(images)
    assert all(merger.running_logits.any() for _, merger in ltm.api.mergers(model))
    ltm.freeze_(model)
    ltm.save(model, tmp_path)
    again = ltm.load(tmp_path, toy(name))
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


@pytest.mark.slow
def test_a_compiled_model_is_saved_as_what_it_is(tmp_path):
    model, images = prepared("vit", STATIC)
    ltm.save(torch.compile(model), tmp_path)
    again = ltm.load(tmp_path, toy("vit"))
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


def test_a_host_that_does_not_fit_stays_as_it_was(tmp_path):
    model, images = prepared("vit", STATIC)
    ltm.save(ltm.freeze_(model), tmp_path)
    host = toy("vit")
    host.reset_classifier(5)
    with torch.no_grad():
        before = host(images)
        with pytest.raises(ValueError, match=r"head\.bias is \(10,\) instead of \(5,\)"):
            ltm.load(tmp_path, host)
        assert not ltm.api.is_merging(host)
        assert torch.equal(host(images), before)


def test_an_entry_that_is_missing_is_said(tmp_path):
    model, _ = prepared("vit", STATIC)
    ltm.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["token_merging"]["active"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="token_merging lacks active"):
        ltm.load(tmp_path, toy("vit"))


@pytest.mark.slow
def test_a_timm_model_comes_back_without_a_host(tmp_path):
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=64).eval()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    ltm.save(model, tmp_path)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ltm.load(tmp_path)(images), model(images))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "vit_tiny_patch16_224"
    assert config["token_merging"]["method"] == "ltm"
    assert config["num_classes"] == 7


@pytest.mark.filterwarnings("ignore::UserWarning:timm.layers.interpolate")  # resizing Swin
@pytest.mark.parametrize(
    ("name", "size"),
    [("vit_tiny_patch16_224", 64), ("swin_tiny_patch4_window7_224", 192), ("mobilevit_xxs", 128)],
)
@pytest.mark.slow
def test_images_are_prepared_for_the_size_that_was_converted(name, size, tmp_path):
    model = timm.create_model(name, num_classes=3).eval()
    if hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(size, size))
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "crop_pct": 1.0}
    ltm.merge_tokens_(model, ltm.ToMe(ratio=0.9), size)
    ltm.save(model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["pretrained_cfg"]["input_size"] == [3, size, size]
    again = ltm.load(tmp_path)
    expected = timm.data.resolve_model_data_config(again)
    assert expected["input_size"] == (3, size, size)
    assert expected["mean"] == (0.1, 0.2, 0.3)
    photo = Image.new("RGB", (300, 260), (200, 30, 30))
    images = timm.data.create_transform(**expected)(photo)[None]
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("given", "same"),
    [
        (
            {"ratio": np.float32(0.75), "gain": np.float64(0.5)},
            {"ratio": 0.75, "gain": 0.5},
        ),
        (
            {"counts": list(np.array([20, 9])), "sites": list(np.array([1, 3]))},
            {"counts": (20, 9), "sites": (1, 3)},
        ),
    ],
)
def test_numbers_of_numpy_are_saved_as_plain_ones(given, same, tmp_path):
    config = ltm.LTM.from_settings(given)
    assert repr(config) == repr(ltm.LTM.from_settings(same))
    model, _ = prepared("vit", config)
    again = ltm.load(ltm.save(model, tmp_path), toy("vit"))
    assert again.token_merging.config == config


def test_what_does_not_fit_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ltm\.save"):
        ltm.load(tmp_path)
    model, _ = prepared("vit", ltm.ToMe(per_block=0.9))
    ltm.save(model, tmp_path)
    with pytest.raises(ValueError, match="made with the arguments"):
        ltm.load(tmp_path, toy("registers"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="so its network does not merge; take it by its name"):
        ltm.load(tmp_path, toy("vit"))
    (tmp_path / "config.json").write_text('{"detector": {}, "token_merging": {}}')
    with pytest.raises(ValueError, match="it holds a detector"):
        ltm.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        ltm.load(tmp_path, toy("vit"))


def test_a_frozen_model_stays_as_it_is():
    model, _ = prepared("vit", STATIC)
    ltm.freeze_(model)
    with pytest.raises(ValueError, match="frozen"):
        ltm.api.set_ratio_(model, 0.9)
    assert ltm.freeze_(model) is model


@torch.no_grad()
@pytest.mark.parametrize("name", ["mobilevit", "efficientvit"])
@pytest.mark.parametrize(("size", "other"), [((64, 128), (128, 64)), ((128, 128), (64, 256))])
def test_frozen_masks_are_for_the_grids_that_they_were_made_for(name, size, other):
    images, others = torch.randn(3, 3, *size), torch.randn(3, 3, *other)
    model = toy(name)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.6, weights=ltm.Informative(gain=1.0)), size)
    ltm.collect_statistics_(model, [(images, torch.arange(3))])
    frozen = ltm.freeze_(copy.deepcopy(model))
    assert not [key for key in frozen.state_dict() if "chosen" in key]
    for batch in (images, others):
        torch.testing.assert_close(frozen(batch), model(batch))
    static = toy(name)
    ltm.merge_tokens_(static, ltm.LTM(per_block=0.6, weights="uniform"), size)
    with pytest.raises(ValueError, match=r"is frozen for \d+ x \d+ tokens, and \d+ x \d+ came in"):
        ltm.freeze_(static)(others)


@torch.no_grad()
@pytest.mark.slow
def test_supports_follow_the_logits_that_are_loaded(tmp_path):
    model, images = prepared("efficientvit", ltm.LTM(ratio=0.8))
    for logits in (p for n, p in model.named_parameters() if n.endswith("logits")):
        logits.uniform_(-1, 1)
    ltm.freeze_(model)
    ltm.save(model, tmp_path)
    torch.testing.assert_close(ltm.load(tmp_path, toy("efficientvit"))(images), model(images))


@pytest.mark.slow
def test_what_a_model_was_made_with_is_saved(tmp_path):
    arguments = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", **arguments, num_classes=5).eval()
    remember_arguments(model, {**arguments, "num_classes": 5, "pretrained": False})
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    folder = ltm.save(model, tmp_path / "run" / "model")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for place in (folder, tmp_path / "run"):
            assert torch.equal(ltm.load(place)(images), model(images))
    assert (folder / "model.safetensors").stat().st_mode & 0o044


@torch.no_grad()
@pytest.mark.slow
def test_a_frozen_mask_refuses_smaller_images_even_where_it_would_not_merge():
    model = timm.create_model("efficientvit_b0", num_classes=5).eval()
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8, weights="uniform"), 224)
    ltm.freeze_(model)
    with pytest.raises(ValueError, match="is frozen for 14 x 14 tokens, and 4 x 4 came in"):
        model(torch.randn(1, 3, 64, 64))


@pytest.mark.slow
def test_networks_of_any_size_refuse_set_input_size_and_stay_as_they_are():
    model, images = prepared("mobilevit", STATIC)
    with torch.no_grad():
        before = model(images)
        with pytest.raises(ValueError, match="set_input_size: this network takes any size"):
            model.set_input_size((64, 64))
        assert torch.equal(model(images), before)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize(
    ("name", "size"), [("vit_tiny_patch16_224", 32), ("mobilevit_xxs", 64), ("efficientvit_b0", 64)]
)
def test_images_of_other_than_three_channels_come_all_the_way(name, size, channels, tmp_path):
    chosen = {"img_size": size} if "patch16" in name else {}
    model = timm.create_model(name, in_chans=channels, num_classes=3, **chosen).eval()
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.8, weights="uniform"), size)
    ltm.freeze_(model)
    assert round(1e9 * ltm.gmacs(model)) == ltm.api.report(model).macs_after
    images = torch.randn(2, channels, size, size)
    again = ltm.load(ltm.save(model, tmp_path))
    assert torch.equal(again(images), model(images))
    assert again.pretrained_cfg["input_size"] == (channels, size, size)


def small(**arguments):
    """A ViT of few pixels, as timm makes it."""
    return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=7, **arguments).eval()


@torch.no_grad()
@pytest.mark.parametrize("unusual", [{"act_layer": "relu"}, {"num_heads": 6}])
@pytest.mark.slow
def test_a_network_of_other_layers_is_not_taken_for_the_saved_one(unusual, tmp_path):
    model, images = small(**unusual), torch.randn(2, 3, 64, 64)
    ltm.merge_tokens_(model, ltm.ToMe(per_block=0.9))
    ltm.save(model, tmp_path)
    with pytest.raises(ValueError, match=r"other layers .* made with the arguments"):
        ltm.load(tmp_path)
    assert torch.equal(ltm.load(tmp_path, small(**unusual))(images), model(images))
    remember_arguments(model, unusual)
    ltm.save(model, tmp_path)
    assert torch.equal(ltm.load(tmp_path)(images), model(images))


def test_folders_without_a_fingerprint_load(tmp_path):
    model, images = prepared("vit", STATIC)
    config = ltm.save(model, tmp_path) / "config.json"
    known = json.loads(config.read_text())
    del known["fingerprint"]
    config.write_text(json.dumps(known))
    with torch.no_grad():
        again = ltm.load(tmp_path, toy("vit"), verify=False)
        assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("name", TOYS)
def test_a_merging_network_has_the_fingerprint_of_the_original(name):
    model, _ = prepared(name, STATIC)
    assert fingerprint(model) == fingerprint(toy(name))
    assert fingerprint(ltm.freeze_(model)) == fingerprint(toy(name))
    assert len({fingerprint(toy(other)) for other in ("vit", "qk_norm", "swin")}) == 3


@pytest.mark.slow
@torch.no_grad()
def test_networks_that_take_any_size_do_so_when_they_are_loaded(tmp_path):
    model = small(dynamic_img_size=True)
    ltm.merge_tokens_(model, ltm.ToMe(per_block=0.9))
    images = torch.randn(2, 3, 96, 64)
    assert torch.equal(ltm.load(ltm.save(model, tmp_path))(images), model(images))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mobilevit_xxs"])
def test_feature_extractors_are_not_saved(name, tmp_path):
    model = timm.create_model(name, features_only=True)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.9), 224)
    with pytest.raises(ValueError, match="feature maps"):
        ltm.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_that_ltm_has_not_written_is_not_replaced(tmp_path, name):
    """0.1.0 replaces whatever is there."""
    (tmp_path / name).write_text('{"architecture": "vit_tiny_patch16_224"}')
    model, _ = prepared("vit", STATIC)
    with pytest.raises(FileExistsError, match=f"has a {name} that ltm has not written"):
        ltm.save(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("at", ["json.dumps", "ltm.api.folders.save_tensors", "os.fsync"])
def test_saving_replaces_a_model_as_a_whole_or_not_at_all(at, tmp_path, monkeypatch):
    """0.1.0 leaves new weights beside the old config where the disk is full."""
    first, images = prepared("vit", ltm.ToMe(per_block=0.9))
    ltm.save(first, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    second, _ = prepared("vit", STATIC)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(at, full)
        with pytest.raises(OSError, match="No space"):
            ltm.save(second, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ltm.load(tmp_path, toy("vit"))(images), first(images))
    ltm.save(second, tmp_path)
    assert type(ltm.api.conversion_of(ltm.load(tmp_path, toy("vit"))).config) is ltm.LTM
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json", "model.safetensors", "notes.txt"
    ]  # fmt: skip
