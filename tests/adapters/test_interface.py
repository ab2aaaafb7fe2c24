"""timm's own interface on converted models, other input sizes, and what is refused."""

import copy
import re
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.layers.adaptive_avgmax_pool import SelectAdaptivePool2d
from timm.models._features import FeatureGetterNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import ltm
from ltm import zoo
from ltm.adapters.blocks import _taken_up
from ltm.adapters.grids import SizedPool
from ltm.api import merging_off, set_ratio_, watching
from ltm.methods import methods
from toys import GRIDS, SEQUENCES, TOYS, pairs, pictures, size_of, toy


def convert(model, name, **settings):
    ltm.merge_tokens_(model, ltm.LTM.from_settings(settings or {"ratio": 0.8}), size_of(name))
    return model


@pytest.mark.parametrize(("method", "name"), pairs(n for n in TOYS if n != "distilled"))
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


@pytest.mark.parametrize("name", ["vit", "swin", "mobilevit", "efficientvit"])
def test_intermediates_take_timms_arguments_in_its_order(name):
    model, images = toy(name), pictures(name)
    prefixes = (True,) if name == "vit" else ()
    given = (1, *prefixes, True, False, "NCHW", True)
    expected = model.forward_intermediates(images, *given)
    ltm.merge_tokens_(model, ltm.LTM(ratio=1), size_of(name))
    found = model.forward_intermediates(images, *given)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    with pytest.raises(AssertionError, match="must be"):
        model.forward_intermediates(images, output_fmt="foo")


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


@pytest.mark.parametrize("merging", [False, True])
def test_a_size_that_a_network_cannot_take_is_said(merging):
    model = toy("vit")
    if merging:
        ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    with pytest.raises(ValueError, match="cannot take images of 100 x 100 pixels"):
        ltm.gmacs(model, 100)


def test_a_vit_inside_another_module_meets_its_budget():
    inside = nn.Sequential(toy("vit"))
    report = ltm.merge_tokens_(inside, ltm.LTM(ratio=0.8))
    assert report == ltm.merge_tokens_(toy("vit"), ltm.LTM(ratio=0.8))
    assert report.macs_after == round(1e9 * ltm.gmacs(inside))


@pytest.mark.parametrize("name", ["vit", *GRIDS])
def test_networks_inside_another_module_have_their_classes(name):
    inside, images = nn.Sequential(toy(name)), pictures(name)
    ltm.merge_tokens_(inside, ltm.LTM(per_block=0.4), size_of(name))
    ltm.collect_statistics_(inside, [images])
    assert all(merger.active for _, merger in ltm.api.mergers(inside))


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("config", [ltm.LTM(ratio=0.8), ltm.LTM(ratio=0.8, support=ltm.Learned())])
def test_feature_extractors_are_counted_with_what_they_restore(inside, config):
    net = FeatureGetterNet(toy("vit"))
    net = nn.Sequential(net) if inside else net
    report = ltm.merge_tokens_(net, config)
    assert 0.75 < report.share <= 0.8
    assert report.macs_after == round(1e9 * ltm.gmacs(net))


def test_two_vits_in_one_module_are_refused():
    with pytest.raises(ValueError, match="more than one network of this family; convert"):
        ltm.merge_tokens_(nn.Sequential(toy("vit"), toy("vit")), ltm.LTM(per_block=0.8))


@pytest.mark.parametrize("name", [n for n in TOYS if n != "headless"])
def test_a_new_classifier(name):
    model, images = convert(toy(name), name), pictures(name)
    ltm.collect_statistics_(model, [images])
    model.reset_classifier(4)
    assert model(images).shape == (2, 4)
    ltm.collect_statistics_(model, [(images, torch.tensor([3, 1]))])


@pytest.mark.parametrize("name", ["headless", "vit"])
def test_a_new_classifier_is_where_the_network_is(name):
    model = convert(toy(name).to("meta"), name)
    model.reset_classifier(4)
    mergers = [merger for _, merger in ltm.api.mergers(model)]
    assert all(merger.informative.centroids.shape[0] == 4 for merger in mergers)
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_a_new_pool_knows_the_sizes_of_tokens(name, kind):
    model = convert(toy(name), name)
    model.reset_classifier(4, kind)
    model.reset_classifier(4, "avg")
    pools = [m for m in model.modules() if isinstance(m, SelectAdaptivePool2d)]
    assert [type(pool) for pool in pools] == [SizedPool]
    assert pools[0].state is model.token_merging.state
    ltm.unmerge_tokens_(model)
    assert not any(isinstance(m, SizedPool) for m in model.modules())


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "support"),
    [("vit", None), ("vit", ltm.Learned()), ("swin", None), ("mobilevit", None)],
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


@pytest.mark.slow
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
@pytest.mark.parametrize("name", ["vit", "registers", "swin"])
def test_resizing_that_fails_changes_nothing(name):
    model, images = convert(toy(name), name, ratio=0.9), pictures(name)
    ltm.collect_statistics_(model, [images])
    done, kinds = model.token_merging, [type(m) for m in model.modules()]
    weights, expected = dict(model.named_parameters()), model(images)
    wrong = [({"img_sise": 96}, TypeError), ({"img_size": 2}, (ValueError, RuntimeError))]
    for arguments, error in [*wrong, ({"img_size": "large"}, Exception)]:
        with pytest.raises(error):
            model.set_input_size(**arguments)
        assert model.token_merging is done
        assert [type(m) for m in model.modules()] == kinds
        assert all(p is weights[n] for n, p in model.named_parameters())
        assert model.patch_embed.img_size == (size_of(name),) * 2
        assert torch.equal(model(images), expected)
    model.set_input_size(img_size=2 * size_of(name))
    assert model.token_merging.image_size == (2 * size_of(name),) * 2


def differs_from_its_original(model, images, expected):
    """Whether merging shows, where the model without it is the original."""
    found = model(images)
    with merging_off(model):
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=0)
    assert torch.isfinite(found).all()
    return (found - expected).abs().max() > 1e-6


@pytest.mark.slow
@torch.no_grad()
def test_other_sizes_without_resizing():
    settings = {"patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 2, "num_classes": 10}
    vit = VisionTransformer(img_size=48, dynamic_img_size=True, **settings).eval()
    batches = [torch.randn(2, 3, *size) for size in ((48, 48), (64, 64), (40, 72))]
    originals = [vit(images) for images in batches]
    for config in (ltm.LTM(), ltm.LTM(support=ltm.Learned()), ltm.ToMe()):
        ltm.merge_tokens_(vit, config)
        for images, expected in zip(batches, originals, strict=True):
            assert differs_from_its_original(vit, images, expected)
        ltm.unmerge_tokens_(vit)
    for name in ("mobilevit", "efficientvit"):
        model = convert(toy(name), name)
        for size in (128, 160):
            images = torch.randn(1, 3, size, size + 32)
            assert differs_from_its_original(model, images, toy(name)(images))


def num_left_out(model, images):
    """Tokens that went into no merged token."""
    with watching(model) as records:
        model(images)
    merges = [record.decision.merge for record in records if record.decision is not None]
    assert merges
    return sum(int((merge.weights().sum(dim=2) == 0).sum()) for merge in merges)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "mobilevit", "efficientvit"])
@torch.no_grad()
def test_a_learned_support_leaves_no_token_out_at_other_sizes_and_ratios(name):
    model = toy(name)
    if name == "vit":
        settings = {"embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 10}
        model = VisionTransformer(48, patch_size=4, dynamic_img_size=True, **settings).eval()
    convert(model, name, ratio=0.9, support="learned", weights="uniform")
    side = size_of(name)
    for size in ((side, side), (side + 32, side + 64), (side // 2, 2 * side), (3 * side, 64)):
        assert num_left_out(model, torch.randn(1, 3, *size)) == 0
    set_ratio_(model, 0.8)
    assert num_left_out(model, torch.randn(1, 3, side, side)) == 0


@pytest.mark.filterwarnings("ignore:This network gives merged tokens")
@torch.no_grad()
def test_a_learned_support_on_an_image_of_another_shape_with_as_many_patches():
    settings = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = VisionTransformer(48, patch_size=8, dynamic_img_size=True, **settings).eval()
    other, images = copy.deepcopy(model), torch.randn(2, 3, 32, 72)
    config = ltm.LTM(support=ltm.Learned(), counts=(20, 12), sites=(0, 1))
    ltm.merge_tokens_(model, config)
    ltm.merge_tokens_(other, config, (32, 72))
    torch.testing.assert_close(model(images), other(images))
    features, maps = model.forward_intermediates(images)
    torch.testing.assert_close(features, other.forward_features(images))
    assert maps[-1].shape[-2:] == (4, 9)
    with pytest.raises(ValueError, match="is frozen for 6 x 6 patches, and 4 x 9 came in"):
        ltm.freeze_(model)(images)


@pytest.mark.parametrize("size", [256, 384])
@torch.no_grad()
def test_swin_at_other_sizes(size):
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=size, depths=(1, 1, 1, 1))
    images = torch.randn(1, 3, size, size)
    expected = model.eval()(images)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.8))
    assert differs_from_its_original(model, images, expected)


def any_size_swin():
    torch.manual_seed(0)
    settings = {"embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 10}
    return SwinTransformer(img_size=112, strict_img_size=False, **settings).eval()


@pytest.mark.parametrize("planned", [112, (128, 96)])
@pytest.mark.parametrize("config", [ltm.LTM(per_block=0.8), ltm.ToMe(ratio=0.95), ltm.LTM(ratio=1)])
@torch.no_grad()
def test_swin_that_merges_nothing_is_the_original_at_any_size(config, planned):
    """Also on maps that its windows do not divide."""
    model, images = any_size_swin(), torch.randn(1, 3, 128, 96)
    expected = model(images)
    report = ltm.merge_tokens_(model, config, planned)
    assert report.macs_after == round(1e9 * ltm.gmacs(model))
    merges = (model(images) - expected).abs().max() > 1e-3
    assert merges == (config.ratio != 1)
    with merging_off(model):
        torch.testing.assert_close(model(images), expected)


def test_hints_of_padded_and_shifted_windows_belong_to_their_tokens():
    model, found = any_size_swin(), {}
    ltm.merge_tokens_(model, ltm.ToMe(per_block=0.8), (128, 96))
    block = model.layers[0].blocks[1]
    block.attn.qkv.register_forward_pre_hook(lambda _m, args: found.update(attended=args[0]))
    block.merger.register_forward_pre_hook(lambda _m, args: found.update(hints=args[1]))
    model(torch.randn(1, 3, 128, 96))
    padding = (found["attended"] == 0).all(dim=-1)
    assert any(block.shift)
    assert padding.any()
    assert torch.equal(padding, found["hints"].size == 0)


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


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("reg_tokens", [0, 4])
def test_importance_comes_from_the_class_token_or_else_from_the_mean_query(class_token, reg_tokens):
    settings = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "global_pool": "avg"}
    vit = VisionTransformer(48, class_token=class_token, reg_tokens=reg_tokens, **settings).eval()
    ltm.merge_tokens_(vit, ltm.LTM(counts=(20,), sites=(0,)))
    block, found = vit.blocks[0], {}
    block.attn.qkv.register_forward_hook(lambda _m, _args, out: found.update(qkv=out))
    block.merger.register_forward_pre_hook(lambda _m, args: found.update(hints=args[1]))
    vit(pictures("vit"))
    query, key, _ = found["qkv"].unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
    asking = query[:, :, :1] if class_token else query.mean(dim=2, keepdim=True)
    received = (asking @ key.mT / 4).softmax(dim=-1).mean(dim=1)[:, 0]
    torch.testing.assert_close(found["hints"].importance, received)
    ltm.unmerge_tokens_(vit)
    assert "class_token" not in vars(block)


@pytest.mark.slow
def test_names_in_timms_registry_pass_on_what_timm_was_given(monkeypatch):
    given, create = {}, timm.create_model

    def note(host, **arguments):
        given.update(arguments)
        return create(host, **arguments)

    monkeypatch.setattr(zoo, "timm", SimpleNamespace(create_model=note))
    with torch.device("meta"):
        model = create(
            "ltm_vit_small_patch16_224",
            pretrained_cfg_overlay={"mean": (0.0, 0.0, 0.0)},
            cache_dir="weights",
            depth=2,
        )
    assert model.pretrained_cfg["mean"] == (0.0, 0.0, 0.0)
    assert given["cache_dir"] == "weights"


REFUSED = {
    "mobilevitv2_050": "MobileViTv2",
    "resnet18": "no blocks",
    "cait_xxs24_224": "class attention",
    "levit_128s": "a pyramid of attention",
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
    for door in (lambda: ltm.merge_tokens_("vit", ltm.LTM()), lambda: ltm.gmacs("vit")):
        with pytest.raises(TypeError, match="model: got str; give a network"):
            door()
    with pytest.raises(TypeError, match="config"):
        ltm.merge_tokens_(toy("vit"), "tome")
    with pytest.raises(ValueError, match="merge_tokens_ first"):
        ltm.unmerge_tokens_(toy("vit"))
    headless = convert(toy("headless"), "headless")
    with pytest.raises(ValueError, match="statistics"):
        ltm.collect_statistics_(headless, [pictures("headless")])


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_a_network_inside_another_is_converted_once(name):
    """The second conversion ended in KeyError."""
    whole = nn.Sequential(toy(name))
    for first, second in ((whole, whole[0]), (whole[0], whole)):
        ltm.merge_tokens_(first, ltm.LTM(ratio=0.9), size_of(name))
        with pytest.raises(ValueError, match="already"):
            ltm.merge_tokens_(second, ltm.ToMe(ratio=0.9), size_of(name))
        ltm.unmerge_tokens_(first)


def test_a_network_that_is_distributed_already_is_refused(tmp_path):
    """An assertion of torch failed."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(toy("vit"))
        with pytest.raises(ValueError, match="model: got DistributedDataParallel; convert the"):
            ltm.merge_tokens_(model, ltm.LTM())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sites", [(5, 3, 1), (1, 3, 3)])
def test_sites_with_counts_are_given_once_and_in_order(sites):
    with pytest.raises(ValueError, match=r"sites: got .* in ascending order"):
        ltm.LTM(sites=sites, counts=(12, 8, 5))
    assert ltm.LTM(sites=sites).sites == tuple(sorted(set(sites)))
    assert ltm.ToMe(sites=(1, 3, 5), counts=(12, 8, 5)).sites == (1, 3, 5)


@pytest.mark.usefixtures("unchecked_shapes")
def test_sizes_that_are_none():
    for size, message in (
        (8, "cannot take images of 8 x 8 pixels"),
        ("a", "image_size: got 'a'; give a number of pixels"),
        ((48, 48, 3), "or .height, width."),
        (0, "got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ltm.merge_tokens_(toy("vit"), ltm.LTM(), image_size=size)


def test_bad_settings():
    for make, word in [
        (lambda: ltm.LTM(ratio=1.2), "ratio"),
        (lambda: ltm.ToMe(ratio=0.5, per_block=0.5), "one of"),
        (lambda: ltm.LTM(weights=ltm.Informative(beta=-1)), "beta"),
        (lambda: ltm.LTM(weights=ltm.Informative(eta=0)), "eta"),
        (lambda: ltm.LTM.from_settings({"support": "matching", "space": "token"}), "learned"),
        (lambda: ltm.ToFu(switch=2), "switch"),
        (lambda: ltm.LTMP(temperature=0), "temperature"),
    ]:
        with pytest.raises(ValueError, match=word):
            make()


def test_token_space_is_refused_with_its_size():
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    with pytest.raises(ValueError, match=r"MiB at block"):
        ltm.merge_tokens_(model, ltm.LTM(support=ltm.Learned(space="token"), per_block=0.9))


@pytest.mark.parametrize("name", SEQUENCES | GRIDS)
@torch.no_grad()
def test_half_precision_weights(name):
    """Of masks that are learned: whom a token matches may hang on its last digit."""
    model, images = convert(toy(name), name, ratio=0.8, support="learned"), pictures(name)
    expected = model(images)
    found = model.bfloat16()(images.bfloat16()).float()
    assert (found - expected).abs().max() < 0.1 * expected.std()


@pytest.mark.parametrize("method", [ltm.LTM, ltm.ToMe, ltm.ToFu, ltm.LTMP])
@pytest.mark.parametrize("field", ["ratio", "per_block"])
@pytest.mark.parametrize("value", ["a", "0.7", [0.7], 1j])
def test_what_is_no_number_is_no_ratio(method, field, value):
    config = object.__new__(method)  # under pytest types are checked before the settings see them
    object.__setattr__(config, field, value)
    says = re.escape(f"{field}: got {value!r}; it must be a number larger than 0 and at most 1.")
    with pytest.raises(ValueError, match=says):
        config.__post_init__()


@pytest.mark.parametrize(
    ("merging", "starts", "taken_up"),
    [
        ((1, 3), (1, 0, 0, 0, 0), (1, 1, 1, 0, 0)),
        ((0, 2), (1, 0, 1, 0, 0), (0, 0, 0, 0, 0)),
        ((0, 2, 4), (1, 0, 1, 0, 0), (0, 0, 1, 1, 0)),
        ((0, 1, 2), (1, 1, 1), (0, 0, 0)),
        ((), (1, 0), (0, 0)),
    ],
)
def test_a_site_hands_on_to_later_ones_of_its_stage(merging, starts, taken_up):
    found = _taken_up(merging, [bool(fresh) for fresh in starts])
    assert found == [bool(taken) for taken in taken_up]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("method", "name"), pairs(n for n in SEQUENCES if n not in ("eva02", "beit"))
)
def test_an_empty_batch_gives_an_empty_result(method, name, frozen):
    """As without merging. In 0.1.0 LTMP looked for the longest of no images: a RuntimeError."""
    model = toy(name)
    empty = pictures(name)[:0]
    expected = model(empty).shape
    ltm.merge_tokens_(model, methods()[method](per_block=0.8), size_of(name))
    if frozen:
        ltm.freeze_(model)
    assert model(empty).shape == expected


@pytest.mark.parametrize(("method", "name"), pairs(GRIDS))
def test_an_empty_batch_is_refused_where_timm_takes_none(method, name):
    """In 0.1.0 a RuntimeError about a reshape inside timm."""
    model, empty = toy(name), pictures(name)[:0]
    ltm.merge_tokens_(model, methods()[method](per_block=0.8), size_of(name))
    for run in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(ValueError, match="images: got an empty batch"):
            run(empty)
