"""Small: networks of a few million parameters on one GPU, in two hours.

ViT-Ti has its published weights and sees ImageNet: what is fine-tuned starts from a network that
has converged. The other networks train from scratch on Tiny-ImageNet until more epochs bring
little, and keep the share of the MACs that the networks they stand for have in the paper. What
tells most comes first, so a run that is cut short leaves whole tables.
"""

from __future__ import annotations

from dataclasses import replace

from ltm.data.config import AugmentConfig, DataConfig
from ltm.detection.settings import RECIPES, DetectionSettings
from ltm.models import changed
from ltm.training.settings import (
    MergeSettings,
    ModelSettings,
    OptimSettings,
    RunSettings,
    TrainSettings,
    TuneSettings,
)
from reproduction.paper_numbers import printed_shares
from reproduction.scales.base import DETECTORS, Layered, Network, Scale, Sources

_EPOCHS = 24
"""Epochs from scratch."""
_RUN = RunSettings(precision="bf16", channels_last=True, keep_every=_EPOCHS // 3)
_TUNING_IMAGES = 10_000
"""An epoch of fine-tuning on Tiny-ImageNet draws so many of its 20,000 training images."""
_IMAGENET_IMAGES = 1000
"""The same on ImageNet, of which a thousand images are enough to run this scale."""
_STATISTICS_IMAGES = 4000
"""Images of a pass for class statistics: 20 a class."""
_DETECTORS = ("MobileViT-XS", "EfficientViT")
_SHAPES = "shapes:size=128,images=2000,val_images=500,classes=5"


def small_scale(sources: Sources) -> Scale:
    """ImageNet and Tiny-ImageNet as the user has them; COCO where given, else generated scenes."""
    if sources.data is None:
        raise ValueError(
            "scale small needs --data: Tiny-ImageNet, a folder or .zip with train and val"
        )
    if sources.imagenet is None:
        raise ValueError(
            "scale small needs --imagenet: ImageNet images, a folder or .zip with train and val"
        )
    vit = _vit(sources.imagenet, sources.weights)
    vit_scratch = _vit_scratch(sources.data)
    # At 128 pixels MobileViT's last maps have 2x2 tokens: nothing to choose from.
    mobilevit = _grid("MobileViT-XS", "MobileViT-XS", "mobilevit_xs", sources.data, 256)
    efficientvit = _grid(
        "EfficientViT-B1", "EfficientViT-B1 [r224]", "efficientvit_b1", sources.data, 128
    )
    as_larger = replace(mobilevit, stands_for="MobileViT-S")  # which some tables are about
    return Scale(
        name="small",
        order=(vit, vit_scratch, mobilevit, efficientvit),
        finetune=(vit, mobilevit),
        finetune_epochs=(1, 4),
        scratch=(vit_scratch, mobilevit, efficientvit),
        letter=vit_scratch.label,
        pruning="EfficientViT-B1",
        pruning_steps=150,
        sweep=vit,
        sweep_epochs=1,
        sweep_scratch=vit_scratch,
        ratios=(0.9, 0.8, 0.7, 0.65, 0.55, 0.4),
        scratch_ratios=(0.7, 0.55),
        bottleneck=(vit, as_larger),
        bottleneck_scratch=(vit_scratch, as_larger),
        bottleneck_epochs=(1, 4),
        by_layer=Layered(network=as_larger, num_layers=9),
        layers=Layered(network=as_larger, num_layers=9),
        layer_share=0.7,
        layer_epochs=1,
        layer_seeds=(0,),
        losses=(mobilevit, efficientvit),
        loss_cycles=1,
        heatmap=vit,
        lora=vit,
        transfer=vit,
        transfer_tune=_transfer(vit, sources.transfer or sources.data),
        races=(vit, mobilevit),
        race_rounds=9,
        detectors=tuple(backbone for backbone in DETECTORS if backbone.label in _DETECTORS),
        detection=_scenes("shapes_ssdlite", sources.coco, 20, 32),
        segmentation=_scenes("shapes_mask_rcnn", sources.coco, 10, 16),
    )


def _data(source: str, size: int, batch: int = 256) -> DataConfig:
    return DataConfig(source=source, image_size=size, batch_size=batch, crop_ratio=1.0)


def _tune(model: ModelSettings, data: DataConfig) -> TrainSettings:
    return TrainSettings(
        model=model,
        merge=MergeSettings(ratio=0.7, statistics_images=_STATISTICS_IMAGES),
        data=data,
        augment=AugmentConfig.light(),
        optim=OptimSettings(epochs=1, lr=5e-3, weight_decay=0.0, min_lr=1e-4),
        tune=TuneSettings(trainable="mergers"),
        run=_RUN,
    )


def _scratch(model: ModelSettings, data: DataConfig) -> TrainSettings:
    return TrainSettings(
        model=model,
        merge=MergeSettings(ratio=0.7, warm_epochs=2, statistics_images=_STATISTICS_IMAGES),
        data=replace(data, batch_size=128),  # more steps: there are few images
        augment=AugmentConfig.light(),
        optim=OptimSettings(
            epochs=_EPOCHS, lr=1e-3, weight_decay=0.05, lr_warmup_epochs=1.0, clip=1.0
        ),
        run=_RUN,
    )


def _grid(label: str, stands_for: str, name: str, source: str, size: int) -> Network:
    model, data = ModelSettings(name=name), _data(source, size)
    return Network(
        label=label,
        stands_for=stands_for,
        scratch=_scratch(model, data),
        tune=_tune(model, replace(data, epoch_images=_TUNING_IMAGES)),
        shares=printed_shares(stands_for),
    )


def _vit_scratch(source: str) -> Network:
    model = ModelSettings(name="vit_tiny_patch16_224", model_args=("patch_size=8",))
    data = _data(source, 64)
    return Network(
        label="ViT-Ti/8",
        stands_for="ViT-B",
        scratch=_scratch(model, data),
        tune=_tune(model, replace(data, epoch_images=_TUNING_IMAGES)),
    )


def _vit(source: str, weights: str | None) -> Network:
    """ViT-Ti/16 with its ImageNet weights."""
    model = ModelSettings(name="vit_tiny_patch16_224", weights=weights, pretrained=weights is None)
    data = DataConfig(source=source, batch_size=100, epoch_images=_IMAGENET_IMAGES)
    tune = replace(_tune(model, data), run=RunSettings())
    return Network(
        label="ViT-Ti",
        stands_for="ViT-B",
        scratch=replace(tune, tune=TuneSettings()),
        tune=tune,
        pretrained=True,
    )


def _transfer(network: Network, source: str) -> TrainSettings:
    return replace(
        network.tune,
        data=_data(source, 224),
        optim=OptimSettings(epochs=3, lr=2e-4, weight_decay=0.05, lr_warmup_epochs=0.5, clip=1.0),
        tune=TuneSettings(),
        run=_RUN,
    )


def _scenes(recipe: str, coco: str | None, epochs: int, batch: int) -> DetectionSettings:
    return changed(
        RECIPES[recipe],
        {
            "detector": {"image_size": [128, 128]},
            "data": {"source": coco or _SHAPES, "batch_size": batch},
            "optim": {"epochs": epochs},
            "run": {"precision": "bf16"},
            "eval_every": epochs,
        },
    )
