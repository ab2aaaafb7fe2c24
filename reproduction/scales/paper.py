"""The paper's settings: ImageNet and COCO, published weights, 300 epochs from scratch."""

from __future__ import annotations

from dataclasses import replace

from ltm.data.config import AugmentConfig
from ltm.detection.settings import RECIPES, DetectionSettings
from ltm.models import changed
from ltm.training.recipes import FINETUNE, SCRATCH
from ltm.training.settings import OptimSettings, TrainSettings, TuneSettings
from reproduction.paper_numbers import printed_shares
from reproduction.scales.base import RATIOS, Layered, Network, Scale, Sources

_LABELS = {
    "mobilevit_xs": "MobileViT-XS",
    "mobilevit_s": "MobileViT-S",
    "efficientvit_b1_r224": "EfficientViT-B1 [r224]",
    "efficientvit_b1_r288": "EfficientViT-B1 [r288]",
    "swin_tiny": "Swin-T",
    "swin_base": "Swin-B",
    "vit_small": "ViT-S",
    "vit_base": "ViT-B",
}
_FINETUNE = (
    "mobilevit_xs", "mobilevit_s", "efficientvit_b1_r224", "swin_tiny", "swin_base", "vit_small",
    "vit_base",
)  # fmt: skip


def paper_scale(sources: Sources) -> Scale:
    """The paper's settings on ImageNet and COCO as the user has them."""
    if sources.data is None:
        raise ValueError("scale paper needs --data: a folder with ImageNet's train and val")
    networks = {name: _network(name, sources.data) for name in _LABELS}
    bottleneck = tuple(
        networks[name] for name in ("mobilevit_s", "efficientvit_b1_r224", "vit_base")
    )
    transfer = replace(
        networks["vit_base"].tune,
        data=replace(networks["vit_base"].tune.data, source=sources.transfer or "hf:cifar100"),
        optim=OptimSettings(epochs=20, lr=1e-4, lr_warmup_epochs=1.0, weight_decay=0.05),
        tune=TuneSettings(),
    )
    return Scale(
        name="paper",
        finetune=tuple(networks[name] for name in _FINETUNE),
        finetune_epochs=(1, 5, 10, 25, 50),
        scratch=tuple(networks.values()),
        letter=_LABELS["mobilevit_xs"],
        pruning="EfficientViT-B1 [r224]",
        pruning_steps=5000,
        sweep=networks["vit_base"],
        sweep_epochs=50,
        sweep_scratch=networks["vit_base"],
        scratch_ratios=RATIOS,
        bottleneck=bottleneck,
        bottleneck_scratch=bottleneck,
        bottleneck_epochs=(1, 10, 50),
        by_layer=Layered(network=networks["mobilevit_s"], num_layers=9),
        layers=Layered(network=networks["mobilevit_s"], num_layers=9),
        layer_share=0.7,
        layer_epochs=50,
        losses=tuple(
            networks[name] for name in ("mobilevit_xs", "mobilevit_s", "efficientvit_b1_r224")
        ),
        heatmap=networks["mobilevit_s"],
        lora=networks["vit_base"],
        transfer=networks["vit_base"],
        transfer_tune=transfer,
        races=tuple(networks[name] for name in ("vit_small", "vit_base", "swin_tiny")),
        race_rounds=30,
        detection=_on_coco("ssdlite", sources),
        segmentation=_on_coco("mask_rcnn", sources),
    )


def _network(name: str, data: str) -> Network:
    scratch, tune = (_on(recipes[name], data) for recipes in (SCRATCH, FINETUNE))
    tune = replace(tune, augment=AugmentConfig())  # the paper names no other for fine-tuning
    return Network(
        label=_LABELS[name],
        stands_for=_LABELS[name],
        scratch=scratch,
        tune=tune,
        pretrained=True,
        shares=printed_shares(_LABELS[name]),
    )


def _on(settings: TrainSettings, data: str) -> TrainSettings:
    return replace(
        settings,
        data=replace(settings.data, source=data),
        run=replace(settings.run, keep_every=max(1, settings.optim.epochs // 3)),
    )


def _on_coco(recipe: str, sources: Sources) -> DetectionSettings:
    return changed(
        RECIPES[recipe],
        {
            "data": {"source": sources.coco or "coco"},
            "detector": {"pretrained": True},
            "run": {"precision": "bf16"},
        },
    )
