"""`hf:NAME`: networks of transformers through the loader of all verbs."""

import copy
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import ltm
import within
from ltm.api.folders import settings_of
from ltm.api.pretrained import processor_entries
from ltm.data.config import DataConfig
from ltm.data.transforms import evaluation_transform
from ltm.evaluation.images import expected_images
from ltm.models import ModelSource
from toys import pictures

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4, "num_labels": 10}
CONFIG = {**SIZES, "image_size": 48, "patch_size": 8}
IMAGES = pictures("vit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def make(kind, processor, **settings):
        path = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**CONFIG, **settings)
        getattr(transformers, f"{kind}ForImageClassification")(config).save_pretrained(path)
        processor.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="module")
def vit(folder):
    names = {index: f"thing {index}" for index in range(10)}
    processor = transformers.ViTImageProcessor(size={"height": 48, "width": 48})
    return folder("ViT", processor, intermediate_size=64, id2label=names)


@pytest.fixture(scope="module")
def dinov2(folder):
    sizes = {"size": {"shortest_edge": 54}, "crop_size": {"height": 48, "width": 48}}
    return folder("Dinov2", transformers.BitImageProcessor(**sizes), mlp_ratio=2)


def test_a_processor_may_leave_its_resampling_open():
    assert processor_entries({"resample": None}, 48)["interpolation"] == "bicubic"
    assert processor_entries({"resample": 2}, 48)["interpolation"] == "bilinear"


@pytest.mark.parametrize("name", ["vit", "dinov2"])
@torch.no_grad()
def test_a_folder_gives_a_classifier_that_merges_and_is_saved(name, request, tmp_path):
    path = request.getfixturevalue(name)
    model = ModelSource(model=f"hf:{path}").load(merges=True)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(path).eval()
    assert torch.equal(model(IMAGES), theirs(IMAGES).logits)
    assert model.num_classes == 10
    before, kind = model(IMAGES), type(model)
    ltm.merge_tokens_(model, ltm.LTM(ratio=0.8))
    ltm.merge_tokens_(theirs, ltm.LTM(ratio=0.8))
    merged = model(IMAGES)
    assert torch.equal(merged, theirs(IMAGES).logits)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(IMAGES), merged)
    ltm.save(model, tmp_path / "saved")
    again = ModelSource(run=tmp_path / "saved").load()
    assert torch.equal(again(IMAGES), merged)
    assert again.pretrained_cfg["mean"] == model.pretrained_cfg["mean"]
    ltm.unmerge_tokens_(model)
    assert type(model) is kind
    assert torch.equal(model(IMAGES), before)


@pytest.mark.parametrize("name", ["vit", "dinov2"])
def test_images_are_prepared_as_the_folder_says(name, request):
    path = request.getfixturevalue(name)
    model = ModelSource(model=f"hf:{path}").load()
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    pixels = 255 * pictures("vit")[0].sigmoid().permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels.astype(np.uint8)).resize((90, 60), Image.Resampling.BICUBIC)
    spec = expected_images(model, DataConfig(source="images"))
    ours = evaluation_transform(spec, normalize=True)(image)
    theirs = processor(image, return_tensors="pt")["pixel_values"][0]
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().mean() < 0.03


def test_verbs_take_it_by_name(vit):
    result = ltm.evaluate(
        f"hf:{vit}", "shapes:size=48", methods=("ltm",), images=20, workers=0, bottleneck=False
    )
    assert (
        0.65
        < result.metrics["models"]["ltm"]["measured_gmacs"]
        / (result.metrics["models"]["base"]["measured_gmacs"])
        <= 0.7
    )


def test_what_cannot_be_opened_is_refused_in_a_sentence(vit, tmp_path):
    for source, match in (
        (ModelSource(model=f"hf:{tmp_path}"), "cannot be found"),
        (ModelSource(model=f"hf:{vit}", image_size=64), "--image-size: a network of transformers"),
        (ModelSource(model=f"hf:{vit}", num_classes=3), "--num-classes"),
    ):
        with pytest.raises(ValueError, match=match):
            source.load()
    transformers.BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a BertModel; known are"):
        ModelSource(model=f"hf:{tmp_path}").load()
    transformers.ViTConfig(architectures=["ViTModel"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"needs a model\.safetensors"):
        ModelSource(model=f"hf:{tmp_path}").load()
    with pytest.raises(ValueError, match="only timm's networks are made anew"):
        ltm.models.create_model(f"hf:{vit}")


def _config(**entries):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **entries}))

    return edit


def _file(name, content, *, instead=None):
    def write(folder):
        (folder / name).write_text(content)
        if instead is not None:
            (folder / instead).unlink()

    return write


def _index(file):
    content = json.dumps({"metadata": {}, "weight_map": {"classifier.bias": file}})
    return _file("model.safetensors.index.json", content, instead="model.safetensors")


HOSTILE = {
    "layers": (_config(num_hidden_layers=10**6), "more layers than its weights"),
    "numbers": (_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; it must be"),
    "size": (_config(hidden_size=2**18), "more than its weights hold"),
    "type": (_config(hidden_size="a"), "hidden_size"),
    "labels": (_config(id2label="x"), "cannot be read"),
    "outside": (_index("../../other.safetensors"), "weight_map names '../../other.safetensors'"),
    "absolute": (_index("/etc/passwd"), "weight_map names '/etc/passwd'"),
    "pickle": (_index("pytorch_model.bin"), "weight_map names 'pytorch_model.bin'"),
    "weights": (_file("model.safetensors", "garbage" * 9), "the weights of model hf:"),
    "adapter": (_file("adapter_config.json", "{}"), "it is an adapter of another network"),
    "processor": (
        _file("preprocessor_config.json", '{"image_processor_type": "ViTImageProcessor", '
        '"size": {"height": 1000000000, "width": 48}}'),
        r"image processor are not readable \(image_size is \(1000000000, 48\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_in_a_sentence(name, vit, tmp_path):
    """Tracebacks, hangs, and files outside the folder that were opened, even as pickles."""
    folder = shutil.copytree(vit, tmp_path / "vit")
    damage, match = HOSTILE[name]
    damage(folder)
    with within.seconds(60), pytest.raises(ValueError, match=match) as caught:
        ModelSource(model=f"hf:{folder}").load()
    assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("entry", ["attn_implementation", "_attn_implementation", "auto_map"])
def test_a_folder_runs_no_code(entry, vit, tmp_path):
    """transformers loads a named attention from the hub, compiled code that it runs."""
    folder = shutil.copytree(vit, tmp_path / "vit")
    of_hub = {"AutoConfig": "evil.Evil"} if entry == "auto_map" else "kernels-community/evil"
    _config(**{entry: of_hub, "quantization_config": {"quant_method": "bitsandbytes"}})(folder)
    (folder / "evil.py").write_text("raise SystemExit('it runs')")
    before = ModelSource(model=f"hf:{vit}").load()
    assert torch.equal(ModelSource(model=f"hf:{folder}").load()(IMAGES), before(IMAGES))


def test_groups_of_settings_run_no_code_either():
    config = {"model_type": "clip", "vision_config": {"_attn_implementation": "some-one/evil"}}
    assert settings_of(transformers.CLIPModel, config).vision_config._attn_implementation is None
