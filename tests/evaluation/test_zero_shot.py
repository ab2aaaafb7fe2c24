"""Zero-shot evaluation, with towers and tokenizers that are made here."""

import json
import warnings

import pytest
import torch

import ltm
from ltm.api.zero_shot import ZeroShotClassifier, open_zero_shot
from ltm.models import method_config
from toys import pictures, toy

pytestmark = pytest.mark.slow
WORDS = ["<pad>", "<s>", "</s>", "a", "photo", "drawing", "of", ".", "disc", "square", "ring"]
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {**SIZES, "num_hidden_layers": 4, "image_size": 48, "patch_size": 8}
TEXT = {**SIZES, "num_hidden_layers": 1, "vocab_size": len(WORDS), "max_position_embeddings": 12}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "projection_size": 32}
SHAPES = "shapes:size=48"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a CLIP or SigLIP with its tokenizer and processor."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    def make(kind):
        path = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(vision_config=VISION, text_config=TEXT)
        getattr(transformers, f"{kind}Model")(config).save_pretrained(path)
        numbers = {word: number for number, word in enumerate(WORDS)}
        tokens = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
        tokens.pre_tokenizer = pre_tokenizers.Whitespace()
        tokens.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **special).save_pretrained(
            path
        )
        processor = getattr(transformers, f"{kind}ImageProcessor")
        size = {"shortest_edge": 54} if kind == "CLIP" else {"height": 48, "width": 48}
        crop = {"crop_size": {"height": 48, "width": 48}} if kind == "CLIP" else {}
        processor(size=size, **crop).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="module")
def open_clip_folder(tmp_path_factory):
    open_clip = pytest.importorskip("open_clip")
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("open_clip")
    vision = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"}
    vision |= {"timm_model_pretrained": False, "image_size": 96}
    text = {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    settings = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    images = {"size": 96, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    config = {"model_cfg": settings, "preprocess_cfg": images}
    (path / "open_clip_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = open_clip.create_model(f"local-dir:{path}", load_weights=False)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, path / "open_clip_model.safetensors")
    return path


def test_opening_a_network_says_nothing(folder):
    """A SigLIP's bias is a parameter; torch warned when it became a number."""
    import transformers

    path = folder("Siglip")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = open_zero_shot(f"hf:{path}", ["disc"])
    bias = transformers.AutoModel.from_pretrained(path).logit_bias
    assert model.bias == float(bias.detach())


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
@torch.no_grad()
def test_scores_are_those_of_transformers(folder, kind):
    import transformers

    path = folder(kind)
    model = open_zero_shot(f"hf:{path}", ["disc", "square", "ring"])
    images = pictures("vit")
    theirs = transformers.AutoModel.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompts = [f"a photo of a {name}." for name in ("disc", "square", "ring")]
    words = tokenizer(prompts, padding="max_length", max_length=12, return_tensors="pt")
    expected = theirs(**words, pixel_values=images).logits_per_image
    torch.testing.assert_close(model(images), expected, atol=1e-4, rtol=1e-4)
    assert model.pretrained_cfg["crop_pct"] == (48 / 54 if kind == "CLIP" else 1.0)
    report = ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    assert 0.7 < report.share <= 0.8
    assert (model(images) - expected).abs().max() > 1e-6


@torch.no_grad()
def test_scores_are_those_of_open_clip(open_clip_folder):
    import open_clip

    name = f"local-dir:{open_clip_folder}"
    templates = ("a photo of a {}.", "a drawing of a {}.")
    model = open_zero_shot(f"open_clip:{name}", ["disc", "ring"], templates)
    theirs, tokenizer = open_clip.create_model(name).eval(), open_clip.get_tokenizer(name)
    texts = [theirs.encode_text(tokenizer([t.format(c) for t in templates]), normalize=True)
             for c in ("disc", "ring")]  # fmt: skip
    classes = torch.nn.functional.normalize(torch.stack([text.mean(0) for text in texts]), dim=-1)
    images = torch.nn.functional.interpolate(pictures("vit"), (96, 96))
    expected = theirs.logit_scale.exp() * theirs.encode_image(images, normalize=True) @ classes.T
    torch.testing.assert_close(model(images), expected, atol=1e-4, rtol=1e-4)
    assert ltm.merge_tokens_(model, ltm.LTM(ratio=0.8)).share <= 0.8


def test_evaluate_compares_merging_towers(folder, open_clip_folder, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"thing {index}" for index in range(10)))
    for model in (f"hf:{folder('CLIP')}", f"open_clip:local-dir:{open_clip_folder}"):
        result = ltm.evaluate(
            model, SHAPES, zero_shot=True, class_names=names, methods=("ltm",), images=20,
            workers=0, bottleneck=False,
        )  # fmt: skip
        assert result.metrics["num_images"] == 20
        assert result.metrics["models"]["ltm"]["agreement"] <= 1
    names.write_text("disc\nsquare\nring")
    with pytest.raises(ValueError, match="10 classes, but the model has 3"):
        ltm.evaluate(model, SHAPES, zero_shot=True, class_names=names, images=20, workers=0)


def test_what_cannot_be_evaluated_zero_shot_is_refused():
    with pytest.raises(ValueError, match="which has no text tower"):
        open_zero_shot("vit_tiny_patch16_224", ["disc"])
    with pytest.raises(ValueError, match=r"has no \{\} in the place"):
        open_zero_shot("hf:x", ["disc"], ["a photo"])
    pytest.importorskip("open_clip")
    with pytest.raises(ValueError, match=r"open_clip:ViT-B-16-SigLIP:TAG, where TAG is webli"):
        open_zero_shot("open_clip:ViT-B-16-SigLIP", ["disc"])
    with pytest.raises(ValueError, match="nowhere"):
        open_zero_shot("open_clip:ViT-B-16:nowhere", ["disc"])
    with pytest.raises(ValueError, match="open_clip has no weights for NoSuch"):
        open_zero_shot("open_clip:NoSuch", ["disc"])
    with pytest.raises(ValueError, match="give the model by its name"):
        ltm.evaluate(toy("vit"), SHAPES, zero_shot=True)


def test_towers_of_ones_own_are_classifiers_too():
    model = ZeroShotClassifier(toy("headless"), torch.randn(5, 32))
    ltm.merge_tokens_(model, method_config("ltm", 0.8), 48)
    assert model(pictures("vit")).shape == (2, 5)
