"""Vision towers of transformers: what holds for timm's networks holds for them."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ltm
from ltm.methods import methods
from toys import pictures

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This network gives merged tokens"),
]

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4}
VISION = {**SIZES, "intermediate_size": 64, "image_size": 48, "patch_size": 8}
DINO = {**SIZES, "mlp_ratio": 2, "image_size": 48, "patch_size": 8, "num_labels": 10}
TEXT = {**SIZES, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 99}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CLASSES = {"num_labels": 10}
BOTH = {"vision_config": VISION, "text_config": TEXT, **CLASSES}
TOWERS = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**VISION, **CLASSES}),
    "vit_alone": ("ViTModel", "ViTConfig", VISION),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {**VISION, **CLASSES}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", DINO),
    "registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        {**DINO, "use_swiglu_ffn": True},
    ),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {**VISION, "num_register_tokens": 2}),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
    "clip_projected": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", VISION),
    "clip_classes": ("CLIPForImageClassification", "CLIPConfig", BOTH),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VISION),
    "siglip_classes": ("SiglipForImageClassification", "SiglipConfig", BOTH),
}


def tower(name):
    return copy.deepcopy(_tower(name))


@functools.cache
def _tower(name):
    torch.manual_seed(0)
    kind, config, settings = TOWERS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def run(model, images, **options):
    out = model(images, **options)
    names = ("logits", "image_embeds", "pooler_output")
    return next(getattr(out, name) for name in names if getattr(out, name, None) is not None)


IMAGES = pictures("vit", batch=3)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in ("ltm", "tome") else pytest.mark.exhaustive)
        for name in sorted(methods())
    ],
)
def test_a_tower_is_converted_and_given_back(name, method):
    model, kind = tower(name), methods()[method]
    before, keys = run(model, IMAGES), list(model.state_dict())
    held = [(type(module), set(vars(module))) for module in model.modules()]
    ltm.merge_tokens_(model, kind(ratio=1))
    assert torch.equal(run(model, IMAGES), before)
    ltm.unmerge_tokens_(model)
    report = ltm.merge_tokens_(model, kind(ratio=0.8))
    assert 0.7 < report.share <= 0.8
    after = run(model, IMAGES)
    assert (after - before).abs().max() > 1e-6 or method == "ltmp"
    alone = torch.cat([run(model, image[None]) for image in IMAGES])
    torch.testing.assert_close(alone, after, atol=1e-5, rtol=1e-4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, IMAGES), after)
    result = model.load_state_dict(tower(name).state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    ltm.unmerge_tokens_(model)
    assert list(model.state_dict()) == keys
    assert [(type(module), set(vars(module))) for module in model.modules()] == held
    assert torch.equal(run(model, IMAGES), before)


PATCHES = {**SIZES, "intermediate_size": 64, "patch_size": 8, "num_patches": 36}
PADDED = {
    "siglip2": ("Siglip2VisionModel", "Siglip2VisionConfig", PATCHES),
    "siglip2_bare": (
        "Siglip2VisionModel",
        "Siglip2VisionConfig",
        {**PATCHES, "vision_use_head": False},
    ),
    "siglip2_classes": (
        "Siglip2ForImageClassification",
        "Siglip2Config",
        {"vision_config": PATCHES, "text_config": TEXT, **CLASSES},
    ),
}


def padded(*shapes):
    """Patches of images of these shapes, as the processor of SigLIP 2 gives them."""
    patches = torch.randn(len(shapes), 36, 3 * 8 * 8, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([height * width for height, width in shapes])
    there = (torch.arange(36) < lengths[:, None]).long()
    return {
        "pixel_values": patches * there[..., None],
        "pixel_attention_mask": there,
        "spatial_shapes": torch.tensor(shapes),
    }


def patch_tower(name):
    kind, config, settings = PADDED[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()


def answer(model, **given):
    out = model(**given)
    names = ("logits", "image_embeds", "pooler_output", "last_hidden_state")
    return next(getattr(out, name) for name in names if getattr(out, name, None) is not None)


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("method", ["ltm", "tome"])
@torch.no_grad()
def test_a_tower_of_patches_is_converted_and_given_back(name, method, tmp_path):
    """SigLIP 2: images have their own shapes, and padding never merges."""
    model = patch_tower(name)
    given, convert = padded((6, 6), (4, 5), (3, 9)), methods()[method]
    before = answer(model, **given)
    held = [(type(module), set(vars(module))) for module in model.modules()]
    ltm.merge_tokens_(model, convert(ratio=1))
    assert torch.equal(answer(model, **given), before)
    ltm.unmerge_tokens_(model)
    assert 0.7 < ltm.merge_tokens_(model, convert(ratio=0.8)).share <= 0.8
    after = answer(model, **given)
    assert model.token_merging.sizes.sum(dim=1).tolist() == [36, 20, 27]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(answer(twin, **given), after)
    assert torch.equal(answer(ltm.load(ltm.save(model, tmp_path)), **given), after)
    assert next(iter(ltm.merge_maps(model, IMAGES).values())).shape[:2] == (3, 36)
    ltm.unmerge_tokens_(model)
    assert [(type(module), set(vars(module))) for module in model.modules()] == held
    assert torch.equal(answer(model, **given), before)


def test_a_tower_of_patches_takes_images_where_verbs_give_them(tmp_path):
    """Whether it merges or not; images are those that the processor would cut."""
    kind, config, settings = PADDED["siglip2_classes"]
    torch.manual_seed(0)
    getattr(transformers, kind)(getattr(transformers, config)(**settings)).save_pretrained(tmp_path)
    model = ltm.ModelSource(model=f"hf:{tmp_path}").load()
    theirs = getattr(transformers, kind).from_pretrained(tmp_path).eval()
    processor = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=36)
    image = Image.fromarray((255 * torch.rand(48, 48, 3)).byte().numpy())
    given = processor(image, return_tensors="pt")
    pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), answer(theirs, **given))
        ltm.merge_tokens_(model, ltm.ToMe(ratio=0.8), 48)
        ltm.merge_tokens_(theirs, ltm.ToMe(ratio=0.8))
        torch.testing.assert_close(model(pixels), answer(theirs, **given))


@pytest.mark.parametrize("name", TOWERS)
def test_hidden_states_are_merged_ones(name):
    model = tower(name)
    ltm.merge_tokens_(model, ltm.LTM(num_tokens=20))
    before = run(model, IMAGES)
    hidden = model(IMAGES, output_hidden_states=True).hidden_states
    prefix = model.token_merging.sites[0].num_prefix
    assert [x.shape[1] - prefix for x in hidden[:1] + hidden[-2:]] == [36, 20, 20]
    assert torch.equal(run(model, IMAGES), before)


@torch.no_grad()
def test_a_tower_says_once_that_its_tokens_are_merged():
    model = tower("vit_alone")
    shape = model(IMAGES).last_hidden_state.shape
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    with pytest.warns(UserWarning, match=r"ltm\.pool_tokens"):
        found = model(IMAGES).last_hidden_state
    assert ltm.restore_tokens(model, found).shape == shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IMAGES)
        ltm.gmacs(model)
        for silent, amount in ((tower("vit"), {"ratio": 0.8}), (tower("clip"), {"num_tokens": 20})):
            ltm.merge_tokens_(silent, ltm.LTM(**amount))
            silent(IMAGES)


@pytest.mark.parametrize("name", ["vit_alone", "dinov3", "clip_projected"])
@torch.no_grad()
def test_features_of_an_earlier_forward_keep_their_sizes(name):
    model, images = tower(name), [IMAGES, IMAGES.flip(3)]
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    expected = [ltm.pool_tokens(model, model(x)) for x in images]
    outputs = [model(x) for x in images]
    for out, mean in zip(outputs, expected, strict=True):
        assert torch.equal(ltm.pool_tokens(model, out), mean)
        assert torch.equal(ltm.pool_tokens(model, out.last_hidden_state), mean)
        assert (
            ltm.restore_tokens(model, out).shape[1] == 36 + model.token_merging.sites[0].num_prefix
        )
    with pytest.raises(ValueError, match="give features as they were returned"):
        ltm.pool_tokens(model, outputs[0].last_hidden_state.double())


@pytest.mark.parametrize("name", ["vit", "dinov2", "dinov3", "siglip"])
@torch.no_grad()
def test_hidden_states_are_pooled_and_restored_each_by_its_own_sizes(name):
    model = tower(name)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    sites = model.token_merging.sites
    hidden = model(IMAGES, output_hidden_states=True).hidden_states
    model(IMAGES.flip(3))
    prefix, left = sites[0].num_prefix, [x.shape[1] for x in hidden]
    assert len(set(left)) > 2
    for x in hidden:
        whole = ltm.restore_tokens(model, x)
        assert whole.shape[1] == prefix + 36
        torch.testing.assert_close(whole[:, prefix:].mean(dim=1), ltm.pool_tokens(model, x))
    assert torch.equal(ltm.restore_tokens(model, hidden[0]), hidden[0])


@pytest.mark.parametrize(
    "name", ["dinov2", "registers", "clip_classes", "siglip", "siglip_classes"]
)
def test_pools_count_a_token_as_often_as_its_size(name):
    """If all counted once, it would say something else."""
    model = tower(name)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    slot = [module.slot for module in model.modules() if hasattr(module, "slot")][-1]
    merged = run(model, IMAGES)
    seen = slot.state.left_by(slot.index)
    left_by = type(slot.state).left_by

    def all_ones(state, index):
        found = left_by(state, index)
        return dataclasses.replace(found, size=torch.ones_like(seen.size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(slot.state), "left_by", all_ones)
        assert (run(model, IMAGES) - merged).abs().max() > 1e-6


@pytest.mark.parametrize("name", [*TOWERS, *PADDED])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    gradients = []
    for checkpointing in (False, True):
        model = (tower(name) if name in TOWERS else patch_tower(name)).train()
        ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(0)  # In training DINOv3 varies its positions.
        answer(model, pixel_values=IMAGES).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", TOWERS)
def test_what_ltm_or_transformers_saved_is_loaded_by_both(name, tmp_path):
    model = tower(name)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    classes = model.token_merging.sites[0].num_classes
    if classes:
        ltm.collect_statistics_(model, [(IMAGES, torch.arange(3))])
    expected, settings = run(model, IMAGES), model.config.to_dict()
    ltm.save(model, tmp_path / "ltm")
    model.save_pretrained(tmp_path / "transformers")
    for folder in tmp_path.iterdir():
        again = ltm.load(folder)
        assert torch.equal(run(again, IMAGES), expected)
        assert again.token_merging.config == model.token_merging.config
        with transformers_quiet():
            plain = type(tower(name)).from_pretrained(folder)
        assert torch.equal(run(plain, IMAGES), run(tower(name), IMAGES))
    assert model.config.to_dict().keys() - settings.keys() <= {"architectures", "dtype"}
    frozen = ltm.freeze_(model)
    frozen.save_pretrained(tmp_path / "frozen")
    assert torch.equal(run(ltm.load(tmp_path / "frozen"), IMAGES), run(frozen, IMAGES))


@contextlib.contextmanager
def transformers_quiet():
    """It tells about the tensors of mergers, which it leaves out."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def test_a_folder_of_another_network_is_refused(tmp_path):
    model = tower("vit")
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    ltm.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, match in (
        ({"architectures": ["TimmBackbone"]}, "known are"),
        ({"hidden_size": 10**9}, "a number up to"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=match):
            ltm.load(tmp_path, verify=False)


def test_a_pipeline_takes_a_converted_classifier():
    model = tower("vit")
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    processor = transformers.ViTImageProcessor(size={"height": 48, "width": 48})
    classify = transformers.pipeline(
        "image-classification", model=model, image_processor=processor, device="cpu"
    )
    image = Image.fromarray((255 * torch.rand(60, 50, 3)).byte().numpy())
    found = classify(image, top_k=10)
    logits = run(model, processor(image, return_tensors="pt")["pixel_values"])
    assert found[0]["score"] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


@pytest.mark.exhaustive
def test_towers_compile_whole_and_are_exported():
    """In a process without shape assertions, which cannot be traced."""
    code = "import test_transformers; test_transformers.trace()"
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@torch.no_grad()
def trace():
    for name in TOWERS:
        _trace(tower(name), pixel_values=IMAGES)
    for name in PADDED:  # transformers looks at each image's shape, so the batch is fixed
        _trace(patch_tower(name), dynamic=False, **padded((6, 6), (4, 5), (3, 9)))


def _trace(model, *, dynamic=True, **given):
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    expected = answer(model, **given)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(answer(compiled, **given), expected)
    batch = {name: {0: torch.export.Dim("batch")} for name in given} if dynamic else None
    exported = torch.export.export(model, (), given, dynamic_shapes=batch).module()
    if dynamic:
        given = {name: value[:2] for name, value in given.items()}
        expected = expected[:2]
    torch.testing.assert_close(answer(exported, **given), expected)


def test_what_cannot_be_converted_is_refused():
    model = transformers.CLIPModel(transformers.CLIPConfig(**BOTH))
    with pytest.raises(ValueError, match=r"CLIPModel is a variant .* its part vision_model"):
        ltm.merge_tokens_(model, ltm.LTM())
    ltm.merge_tokens_(model.vision_model, ltm.LTM())
    tokens = torch.tensor([[1, 5, 2]])
    assert model(tokens, IMAGES).logits_per_image.shape == (3, 1)
    flex = tower("vit")
    flex.vit.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'flex_attention', which takes no token sizes"):
        ltm.merge_tokens_(flex, ltm.LTM())
    model = tower("vit")
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    with pytest.raises(ValueError, match="do not fit merged ones"):
        run(model, IMAGES, attention_mask=(torch.rand(3, 37) > 0.5))


def test_networks_of_no_family_are_refused_by_name():
    """What says nothing of its images was asked for their size instead."""
    settings = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "embedding_size": 8}
    model = transformers.ResNetModel(transformers.ResNetConfig(**settings))
    with pytest.raises(ValueError, match="ResNetModel has no block that can merge tokens"):
        ltm.merge_tokens_(model, ltm.LTM())


def test_transformers_is_not_imported_for_others():
    code = (
        "import sys, timm, torch, ltm; "
        "ltm.merge_tokens_(timm.create_model('vit_tiny_patch16_224', depth=2), ltm.ToMe()); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.real
@torch.no_grad()
def test_vit_tiny_says_the_same_as_timms(real_data):
    import timm
    from safetensors.torch import load_file

    weights = load_file(real_data / "vit_tiny_patch16_224.fp16.safetensors")
    weights = {name: value.float() for name, value in weights.items()}
    theirs = timm.create_model("vit_tiny_patch16_224").eval()
    theirs.load_state_dict(weights)
    settings = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
    config = transformers.ViTConfig(**settings, layer_norm_eps=1e-6, num_labels=1000)
    ours = transformers.ViTForImageClassification(config).eval()
    ours.load_state_dict(_renamed(weights))
    images = nn.functional.interpolate(torch.randn(4, 3, 28, 28), (224, 224), mode="bilinear")
    torch.testing.assert_close(ours(images).logits, theirs(images), atol=1e-5, rtol=1e-5)
    for model in (ours, theirs):
        ltm.merge_tokens_(model, ltm.LTM(ratio=0.7))
    assert ours.token_merging.sites == theirs.token_merging.sites
    torch.testing.assert_close(ours(images).logits, theirs(images), atol=1e-5, rtol=1e-5)


def _renamed(weights):
    """timm's keys as transformers has them."""
    names = {
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
        "blocks.": "layers.",
        ".norm1.": ".layernorm_before.",
        ".norm2.": ".layernorm_after.",
        ".attn.proj.": ".attention.o_proj.",
        ".mlp.": ".mlp.",
    }
    found = {}
    for name, value in weights.items():
        if name.startswith("head."):
            found[name.replace("head.", "classifier.")] = value
            continue
        new = "layernorm" + name[4:] if name.startswith("norm.") else name
        for old, other in names.items():
            new = new.replace(old, other)
        if ".attn.qkv." in new:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                found["vit." + new.replace(".attn.qkv.", f".attention.{part}_proj.")] = third
        else:
            found["vit." + new] = value
    return found


def test_the_snippets_of_the_page_run():
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    with transformers_quiet():
        exec(code, {})


def test_a_projector_gets_as_many_tokens_as_asked_for():
    path = Path(__file__).parents[2] / "examples" / "llava_projector.py"
    assert runpy.run_path(str(path))["main"]() == (1, 144, 96)
