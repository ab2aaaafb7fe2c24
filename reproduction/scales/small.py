"""Small: Tiny-ImageNet, networks of a few million parameters, two hours of one H200 in all.

Few networks, each trained until more epochs bring little. Networks without published weights are
trained here from scratch, stand in for published ones and keep the share of the MACs that those
have in the paper; ViT-Ti starts from its ImageNet weights and learns the 200 classes before
anything is merged. What tells most comes first: a run that is cut short leaves the other tables.
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
_HOST_EPOCHS = 6
"""Epochs in which ViT-Ti, which has ImageNet's weights, learns the classes."""
_RUN = RunSettings(precision="bf16", channels_last=True, keep_every=_EPOCHS // 3)
_TUNING_IMAGES = 10_000
"""An epoch of fine-tuning draws so many of the 20,000 training images."""
_STATISTICS_IMAGES = 4000
"""Images of a pass for class statistics: 20 a class."""
_DETECTORS = ("MobileViT-XS", "EfficientViT")
_SHAPES = "shapes:size=128,images=2000,val_images=500,classes=5"


def small_scale(sources: Sources) -> Scale:
    """Tiny-ImageNet as the user has it; COCO where given, generated scenes otherwise."""
    if sources.data is None:
        raise ValueError(
            "scale small needs --data: Tiny-ImageNet, a folder or .zip with train and val"
        )
    vit = _vit(sources.data, sources.weights)
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
        transfer_tune=_transfer(
            vit, sources.transfer or _SHAPES.replace("classes=5", "classes=20")
        ),
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
        data=replace(data, epoch_images=_TUNING_IMAGES),
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
        tune=_tune(model, data),
        shares=printed_shares(stands_for),
    )


def _vit_scratch(source: str) -> Network:
    model = ModelSettings(name="vit_tiny_patch16_224", model_args=("patch_size=8",))
    data = _data(source, 64)
    return Network(
        label="ViT-Ti/8",
        stands_for="ViT-B",
        scratch=_scratch(model, data),
        tune=_tune(model, data),
    )


def _vit(source: str, weights: str | None) -> Network:
    """ViT-Ti/16 at 224 pixels: from ImageNet's classes to those of the data in a few epochs."""
    model = ModelSettings(
        name="vit_tiny_patch16_224", weights=weights, pretrained=weights is None, drop_path=0.1
    )
    data = _data(source, 224)
    learn = TrainSettings(
        model=model,
        data=data,
        augment=replace(AugmentConfig.light(), scale=(0.35, 1.0), smoothing=0.1),
        optim=OptimSettings(
            epochs=_HOST_EPOCHS, lr=2e-4, weight_decay=0.05, lr_warmup_epochs=1.0, clip=1.0
        ),
        run=_RUN,
    )
    return Network(
        label="ViT-Ti",
        stands_for="ViT-B",
        scratch=learn,
        tune=_tune(replace(model, drop_path=0.0), data),
    )


def _transfer(network: Network, source: str) -> TrainSettings:
    return replace(
        network.tune,
        data=replace(network.tune.data, source=source, epoch_images=0),
        optim=OptimSettings(epochs=3, lr=2e-4, weight_decay=0.05, lr_warmup_epochs=0.5, clip=1.0),
        tune=TuneSettings(),
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
