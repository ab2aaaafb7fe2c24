"""Smoke: generated images, networks of a few thousand parameters, one epoch of a few batches.

Its numbers mean nothing; that they are all there means that every table can be made. Grid networks
merge by the letter's ratio here, since the search for a budget takes seconds.
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
from reproduction.scales.base import Backbone, Layered, Network, Scale, Sources

_VIT = ("img_size=32", "patch_size=8", "embed_dim=16", "depth=3", "num_heads=2")
_EFFICIENTVIT = (
    "widths=(4,4,8,32,64)", "depths=(1,1,1,1,1)", "head_dim=8", "head_widths=(32,32)",
)  # fmt: skip


def smoke_scale(_sources: Sources) -> Scale:
    """Generated images, whatever else is given."""
    vit = _network(
        "ViT",
        "ViT-B",
        "vit_tiny_patch16_224",
        arguments=_VIT,
        size=32,
    )
    efficientvit = _network(
        "EfficientViT",
        "EfficientViT-B1 [r224]",
        "efficientvit_b0",
        arguments=_EFFICIENTVIT,
        size=64,
        per_block=0.8,
    )
    return Scale(
        name="smoke",
        seeds=(0,),
        ratio=0.8,
        peer_ratio=0.85,
        finetune=(vit,),
        finetune_epochs=(1,),
        scratch=(vit, efficientvit),
        letter="ViT",
        pruning="EfficientViT",
        pruning_steps=2,
        sweep=vit,
        sweep_epochs=1,
        sweep_scratch=vit,
        ratios=(0.8, 0.7),
        scratch_ratios=(0.8,),
        bottleneck=(vit,),
        bottleneck_scratch=(vit,),
        bottleneck_epochs=(1,),
        by_layer=Layered(network=vit, num_layers=3),
        layers=Layered(network=vit, num_layers=3),
        layer_share=0.8,
        layer_ratios=(0.5, 0.8),
        layer_epochs=1,
        losses=(vit,),
        heatmap=vit,
        lora=vit,
        transfer=vit,
        transfer_tune=replace(
            vit.tune,
            data=replace(vit.tune.data, source="shapes:classes=3,size=32,images=16,val_images=16"),
            tune=TuneSettings(),
        ),
        races=(vit,),
        batch_sizes=(1, 4),
        table_batch=4,
        race_mode="eager",
        race_dtype="fp32",
        race_rounds=2,
        detectors=(
            Backbone(label="MobileNetv3", stands_for="MobileNetv3", name="mobilenetv3_small_050"),
            Backbone(
                label="MobileViT-XXS", stands_for="MobileViT-XS", name="mobilevit_xxs", merges=True
            ),
        ),
        detection=_scenes("shapes_ssdlite", 4),
        segmenters=(
            Backbone(
                label="EfficientViT-B0",
                stands_for="EfficientViT-B1",
                name="efficientvit_b0",
                merges=True,
            ),
        ),
        segmentation=_scenes("shapes_mask_rcnn", 2),
    )


def _network(
    label: str,
    stands_for: str,
    name: str,
    *,
    arguments: tuple[str, ...],
    size: int,
    per_block: float | None = None,
) -> Network:
    tune = TrainSettings(
        model=ModelSettings(name=name, model_args=arguments),
        merge=MergeSettings(ratio=0.8, per_block=per_block, statistics_images=16),
        data=DataConfig(
            source=f"shapes:classes=4,size={size},images=16,val_images=16",
            image_size=size,
            batch_size=8,
            workers=0,
        ),
        augment=AugmentConfig.light(),
        optim=OptimSettings(epochs=1, lr=1e-2, weight_decay=0.0),
        tune=TuneSettings(trainable="mergers"),
        run=RunSettings(keep_every=1),
    )
    scratch = replace(
        tune,
        optim=OptimSettings(epochs=1, lr=1e-3),
        tune=TuneSettings(),
    )
    return Network(label=label, stands_for=stands_for, scratch=scratch, tune=tune)


def _scenes(recipe: str, batch: int) -> DetectionSettings:
    return changed(
        RECIPES[recipe],
        {
            "detector": {"image_size": [64, 64], "width": 32, "regions_per_image": 8},
            "data": {
                "source": "shapes:size=64,images=4,val_images=4,classes=3",
                "batch_size": batch,
            },
            "optim": {"epochs": 1, "lr_warmup_epochs": 0.0},
            "merge": {"per_block": 0.8},
        },
    )
