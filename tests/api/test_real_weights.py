"""Real ImageNet weights on real images."""

import io
import zipfile

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import ltm

pytestmark = [pytest.mark.real, pytest.mark.slow]
NUM_IMAGES = 150


@pytest.fixture(scope="module")
def model(real_data):
    model = timm.create_model("vit_tiny_patch16_224")
    weights = load_file(real_data / "vit_tiny_patch16_224.fp16.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=True)
    return model.eval()


@pytest.fixture(scope="module")
def data(real_data):
    """Images at equal distances, so that all parts of the label set are seen."""
    images, labels = [], []
    with zipfile.ZipFile(real_data / "imagenet-val.zip") as archive:
        names = sorted(
            n for n in archive.namelist() if n.lower().endswith((".jpeg", ".jpg", ".png"))
        )
        for name in names[:: len(names) // NUM_IMAGES][:NUM_IMAGES]:
            picture = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
            picture = picture.resize((248, 248), Image.Resampling.BICUBIC).crop((12, 12, 236, 236))
            images.append(torch.from_numpy(np.asarray(picture).copy()))
            labels.append(int(name.split("/")[-2]))
    stack = torch.stack(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    return stack, torch.tensor(labels)


@torch.no_grad()
def logits(model, images):
    return torch.cat([model(batch) for batch in images.split(50)])


@pytest.fixture(scope="module")
def original(model, data):
    return logits(model, data[0])


def divergence(original, other):
    p, q = original.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_the_original_scores_as_it_should(original, data):
    top1 = 100 * (original.argmax(1) == data[1]).float().mean()
    assert abs(top1 - 74.15) < 4.5


def test_ltm_stays_closer_to_the_original_than_tome(model, data, original):
    """At the MACs of ToMe with eight tokens a block; far less noisy than accuracy on few images."""
    results = {}
    tome = ltm.ToMe(counts=tuple(196 - 8 * (block + 1) for block in range(12)))
    share = ltm.merge_tokens_(model, tome).share
    results["tome"] = logits(model, data[0])
    ltm.unmerge_tokens_(model)
    assert ltm.merge_tokens_(model, ltm.LTM(ratio=share)).share <= share
    results["ltm"] = logits(model, data[0])
    ltm.unmerge_tokens_(model)
    far = {name: divergence(original, result) for name, result in results.items()}
    same = {
        n: float((r.argmax(1) == original.argmax(1)).float().mean()) for n, r in results.items()
    }
    assert far["ltm"] < 0.6 * far["tome"]
    assert same["ltm"] > same["tome"]
    top1 = {n: 100 * float((r.argmax(1) == data[1]).float().mean()) for n, r in results.items()}
    assert top1["tome"] < 100 * float((original.argmax(1) == data[1]).float().mean()) + 1
    assert top1["ltm"] > top1["tome"] - 1
