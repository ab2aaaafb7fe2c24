"""A tiny network in several methods, pictures, and a comparison made up of plain numbers."""

import pytest
import timm
import torch
from torch import nn

from ltm.data.shapes import example_pictures
from ltm.data.transforms import ImageSpec
from ltm.evaluation.accuracy import Accuracy, PairedDifference
from ltm.evaluation.bottleneck import SiteBottleneck
from ltm.evaluation.latency import Timing
from ltm.evaluation.measurement import Measurement
from ltm.evaluation.records import describe
from ltm.report.comparison import BlockChange, Comparison
from ltm.report.pictures import Scenes, prepare


@pytest.fixture
def scenes() -> Scenes:
    pictures = example_pictures(3, 80)
    names = [picture.name for picture in pictures]
    spec = ImageSpec(size=(64, 64), crop_ratio=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    return prepare([picture.image for picture in pictures], names, spec)


def tiny_vit(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=64,
        patch_size=8,
        embed_dim=24,
        depth=4,
        num_heads=3,
        num_classes=5,
    ).eval()


@pytest.fixture
def vit() -> nn.Module:
    return tiny_vit()


def accuracy(top1: float, agreement: float) -> Accuracy:
    return Accuracy(
        num_images=2000,
        top1=top1,
        top1_interval=(top1 - 0.02, top1 + 0.02),
        top5=min(1.0, top1 + 0.2),
        loss=1.0,
        calibration_error=0.02,
        agreement=agreement,
        divergence=0.1,
    )


def timing(method: str, batch_size: int, factor: float, spread: float = 0.01) -> Timing:
    return Timing(
        model="vit",
        method=method,
        ratio=None,
        gmacs=None,
        image_size=(64, 64),
        batch_size=batch_size,
        dtype="fp32",
        mode="eager",
        scope="model",
        device="cpu",
        milliseconds=10 * batch_size / factor,
        quartiles=(9.0, 11.0),
        images_per_second=100 * factor,
        speedup=factor,
        speedup_interval=(factor - spread, factor + spread),
        verdict=f"{factor:.2f}x" if factor > 1.02 else "no gain here",
    )


def bottleneck(method: str, block: int) -> SiteBottleneck:
    return SiteBottleneck(
        model=method,
        block=block,
        loss=-0.1 * block,
        bound=1 - 0.1 * block,
        c0=-1.0,
        input_information=0.1,
        label_information=0.2,
        num_images=2000,
    )


def network(method: str, top1: float, share: float, difference: float | None = None) -> Measurement:
    against = None
    slow = timing(method, 1, 1.0 if method == "base" else 0.99, 0.02)
    if difference is not None:
        against = PairedDifference(
            difference=difference, low=difference - 0.005, high=difference + 0.005, num_images=2000
        )
    return Measurement(
        method=method,
        parameters=5_700_000,
        gmacs=1.2 * share,
        share=share,
        accuracy=accuracy(top1, 1.0 if method == "base" else 0.93),
        against_base=against,
        timings=(slow, timing(method, 8, 1.2)),
        tokens={0: 64.0, 1: 64 * share},
        bottleneck=tuple(bottleneck(method, block) for block in range(2)),
    )


@pytest.fixture
def comparison() -> Comparison:
    lead = PairedDifference(difference=0.01, low=0.002, high=0.018, num_images=2000)
    return Comparison(
        title="vit <tiny> at 0.70 of its multiply-adds, by LTM",
        model="vit",
        weights="own",
        method="ltm",
        ratio=0.7,
        data="folder",
        num_calibration_images=256,
        finetune_epochs=0,
        seed=3,
        command="ltm compress --data folder --model vit",
        environment=describe(torch.device("cpu")),
        networks=(
            network("base", 0.742, 1.0),
            network("ltm", 0.741, 0.7, -0.001),
            network("tome", 0.731, 0.7, -0.011),
        ),
        lead={"tome": lead},
        blocks=(BlockChange(block=3, before="196", after="150", how="pairs merge"),),
        num_blocks=12,
        left_out={"ltmp": "it cannot reach 0.70."},
    )
