"""timm's own interface on converted models, other input sizes, and what is refused."""

import copy
import re

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import ltm
from ltm.api import set_ratio_
from ltm.methods import methods
from toys import GRIDS, SEQUENCES, TOYS, pictures, size_of, toy


def convert(model, name, **settings):
    ltm.merge_tokens_(model, ltm.LTM(**(settings or {"ratio": 0.8})), size_of(name))
    return model


@pytest.mark.parametrize("name", [n for n in TOYS if n != "distilled"])
@pytest.mark.parametrize("method", sorted(methods()))
def test_intermediates_have_their_nominal_size(name, method):
    model, images = toy(name), pictures(name)
    expected = [f.shape for f in model.forward_intermediates(images, intermediates_only=True)]
    ltm.merge_tokens_(model, methods()[method](per_block=0.8), size_of(name))
    final, maps = model.forward_intermediates(images)
    assert [f.shape for f in maps] == expected
    assert torch.isfinite(final).all()
    assert all(torch.isfinite(f).all() for f in maps)


@pytest.mark.parametrize("name", ["vit", "registers", "pooled"])
def test_intermediates_restore_what_was_merged(name):
    """Where nothing was merged yet, intermediates are the original's, token by token."""
    model, images = toy(name), pictures(name)
    expected = model.forward_intermediates(images, intermediates_only=True, output_fmt="NLC")
    ltm.merge_tokens_(model, ltm.LTM(counts=(20,), sites=(3,)), size_of(name))
    got = model.forward_intermediates(images, intermediates_only=True, output_fmt="NLC")
    for block, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        assert (block < 3) == torch.allclose(a, b, atol=1e-5)
    pairs = model.forward_intermediates(images, return_prefix_tokens=True, intermediates_only=True)
    if model.num_prefix_tokens:
        assert pairs[-1][1].shape[1] == model.num_prefix_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["swin_tiny_patch4_window7_224", "mobilevit_xxs", "efficientvit_b0", "vit_tiny_patch16_224"],
)
def test_features_only_networks_convert(name):
    arguments = {"img_size": 112} if "swin" in name or "vit_tiny" in name else {}
    net = timm.create_model(name, features_only=True, **arguments).eval()
    images = torch.randn(1, 3, 112, 112)
    expected = [f.shape for f in net(images)]
    report = ltm.merge_tokens_(net, ltm.LTM(ratio=0.85), 112)
    assert ltm.gmacs(net, 112) > 0
    assert report.share <= 0.85
    assert [f.shape for f in net(images)] == expected
    ltm.unmerge_tokens_(net)
    assert [f.shape for f in net(images)] == expected


@pytest.mark.parametrize("name", [n for n in TOYS if n != "headless"])
def test_a_new_classifier(name):
    model, images = convert(toy(name), name), pictures(name)
    ltm.collect_statistics_(model, [images])
    model.reset_classifier(4)
    assert model(images).shape == (2, 4)
    ltm.collect_statistics_(model, [(images, torch.tensor([3, 1]))])


@pytest.mark.parametrize("name", ["vit", "swin", "mobilevit"])
def test_a_new_classifier_is_counted_and_comes_back_from_a_file(name, tmp_path):
    def fresh():
        model = toy(name)
        model.reset_classifier(400)
        return model

    model = convert(toy(name), name)
    model.reset_classifier(400)
    report = ltm.api.report(model)
    assert report.macs_before == round(1e9 * ltm.gmacs(fresh(), size_of(name)))
    assert report.macs_after == round(1e9 * ltm.gmacs(model))
    ltm.save(model, tmp_path)
    again = ltm.load(tmp_path, fresh())
    assert ltm.api.report(again) == report
    assert ltm.token_counts(again) == ltm.token_counts(model)


@pytest.mark.parametrize(
    ("name", "support"), [("vit", None), ("vit", "learned"), ("swin", None), ("mobilevit", None)]
)
def test_a_new_classifier_of_a_frozen_model(name, support, tmp_path):
    model, images = toy(name), pictures(name)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.4, support=support), size_of(name))
    known = copy.deepcopy(model)
    ltm.freeze_(model).reset_classifier(4)
    assert ltm.api.report(model).macs_after == round(1e9 * ltm.gmacs(model))
    ltm.save(model, tmp_path)
    host = toy(name)
    host.reset_classifier(4)
    torch.testing.assert_close(ltm.load(tmp_path, host)(images), model(images))
    ltm.collect_statistics_(known, [images])
    with pytest.raises(ValueError, match="before freeze_"):
        ltm.freeze_(known).reset_classifier(4)
    assert known(images).shape == toy(name)(images).shape


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("vit", torch.float16),
        ("vit", torch.float64),
        ("swin", torch.bfloat16),
        ("mobilevit", torch.float16),
        ("efficientvit", torch.bfloat16),
    ],
)
def test_models_of_other_precisions(name, dtype):
    """What is counted is a copy in single precision."""
    model, images = toy(name).to(dtype), pictures(name).to(dtype)
    expected = ltm.merge_tokens_(toy(name), ltm.LTM(per_block=0.4), size_of(name))
    assert ltm.merge_tokens_(model, ltm.LTM(per_block=0.4), size_of(name)) == expected
    assert model.eval()(images).dtype == dtype
    ltm.freeze_(model).reset_classifier(4)
    assert model(images).dtype == dtype
    assert ltm.api.report(model).macs_after == round(1e9 * ltm.gmacs(model))


@pytest.mark.parametrize("name", ["vit", "pooled", "swin", "mobilevit", "efficientvit"])
@pytest.mark.parametrize("method", ["ltm", "tome"])
def test_gradient_checkpointing_gives_the_same_gradients(name, method):
    model, images = toy(name), pictures(name)
    ltm.merge_tokens_(model, methods()[method](per_block=0.4), size_of(name))
    if method == "ltm":
        ltm.collect_statistics_(model, [images])

    def gradients():
        model.zero_grad()
        model(images).square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.set_grad_checkpointing()
    again = gradients()
    assert plain.keys() == again.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(again[key], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["vit", "registers", "swin"])
def test_resizing_replans(name):
    model = convert(toy(name), name)
    before = ltm.token_counts(model)
    size = 64 if name != "swin" else 224
    model.set_input_size(img_size=(size, size))
    assert ltm.token_counts(model) != before
    assert torch.isfinite(model(torch.randn(1, 3, size, size))).all()
    assert model.token_merging.image_size == (size, size)


@pytest.mark.slow
def test_other_sizes_without_resizing():
    settings = {"patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 2, "num_classes": 10}
    vit = VisionTransformer(img_size=48, dynamic_img_size=True, **settings).eval()
    for config in (ltm.LTM(), ltm.LTM(support="learned"), ltm.ToMe()):
        ltm.merge_tokens_(vit, config)
        for size in (48, 64, (40, 72)):
            height, width = size if isinstance(size, tuple) else (size, size)
            assert torch.isfinite(vit(torch.randn(2, 3, height, width))).all()
        ltm.unmerge_tokens_(vit)
    for name in ("mobilevit", "efficientvit"):
        model = convert(toy(name), name)
        for size in (128, 160):
            assert torch.isfinite(model(torch.randn(1, 3, size, size + 32))).all()


@pytest.mark.parametrize("size", [256, 384])
def test_swin_at_other_sizes(size):
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=size, depths=(1, 1, 1, 1))
    ltm.merge_tokens_(model.eval(), ltm.LTM(per_block=0.8))
    assert torch.isfinite(model(torch.randn(1, 3, size, size))).all()


@pytest.mark.parametrize("name", ["vit", "efficientvit"])
def test_a_new_ratio_keeps_what_was_learned(name):
    model = convert(toy(name), name, ratio=0.9)
    images = pictures(name)
    ltm.collect_statistics_(model, [images])
    report = set_ratio_(model, 0.8)
    assert report.share <= 0.8
    assert any(m.active for _, m in ltm.api.mergers(model))
    with pytest.raises(ValueError, match="cannot go below"):
        set_ratio_(model, 0.05)
    assert ltm.api.report(model).share <= 0.9


REFUSED = {
    "eva02_tiny_patch14_224": "EVA",
    "mobilevitv2_050": "MobileViTv2",
    "resnet18": "no blocks",
    "vit_base_patch16_siglip_224": "attention pooling",
    "vit_small_patch16_18x2_224": "parallel blocks",
    "swinv2_cr_tiny_224": "another Swin",
    "vit_relpos_small_patch16_224": "relative positions",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="model: "):
        ltm.merge_tokens_(model, ltm.LTM())
    assert [type(m) for m in model.modules()] == kinds


def test_errors_come_before_any_change():
    model = toy("vit")
    kinds = [type(m) for m in model.modules()]
    for config in (
        ltm.LTM(ratio=0.01),
        ltm.ToMe(counts=(3,)),
        ltm.ToMe(counts=(40,), sites=(2,)),
        ltm.LTM(counts=((4, 4),), sites=(2,)),
        ltm.LTM(sites=(17,)),
    ):
        with pytest.raises(ValueError, match=r"ratio: got|counts: got|sites: got"):
            ltm.merge_tokens_(model, config)
        assert [type(m) for m in model.modules()] == kinds
    ltm.merge_tokens_(model, ltm.LTM())
    with pytest.raises(ValueError, match="already"):
        ltm.merge_tokens_(model, ltm.ToMe())
    with pytest.raises(TypeError, match="config"):
        ltm.merge_tokens_(toy("vit"), "tome")
    with pytest.raises(ValueError, match="merge_tokens_ first"):
        ltm.unmerge_tokens_(toy("vit"))
    headless = convert(toy("headless"), "headless")
    with pytest.raises(ValueError, match="statistics"):
        ltm.collect_statistics_(headless, [pictures("headless")])


def test_bad_settings():
    for make, word in [
        (lambda: ltm.LTM(ratio=1.2), "ratio"),
        (lambda: ltm.ToMe(ratio=0.5, per_block=0.5), "one of"),
        (lambda: ltm.LTM(beta=-1), "beta"),
        (lambda: ltm.LTM(eta=0), "eta"),
        (lambda: ltm.LTM(support="matching", space="token"), "learned"),
        (lambda: ltm.ToFu(switch=2), "switch"),
        (lambda: ltm.LTMP(temperature=0), "temperature"),
    ]:
        with pytest.raises(ValueError, match=word):
            make()


def test_token_space_is_refused_with_its_size():
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    with pytest.raises(ValueError, match=r"MiB at block"):
        ltm.merge_tokens_(model, ltm.LTM(support="learned", space="token", per_block=0.9))


@pytest.mark.parametrize("name", SEQUENCES | GRIDS)
def test_half_precision_weights(name):
    model = convert(toy(name), name).bfloat16()
    assert torch.isfinite(model(pictures(name).bfloat16())).all()


@pytest.mark.parametrize("method", [ltm.LTM, ltm.ToMe, ltm.ToFu, ltm.LTMP])
@pytest.mark.parametrize("field", ["ratio", "per_block"])
@pytest.mark.parametrize("value", ["a", "0.7", [0.7], 1j])
def test_what_is_no_number_is_no_ratio(method, field, value):
    config = object.__new__(method)  # under pytest types are checked before the settings see them
    object.__setattr__(config, field, value)
    says = re.escape(f"{field}: got {value!r}; it must be a number larger than 0 and at most 1.")
    with pytest.raises(ValueError, match=says):
        config.__post_init__()
