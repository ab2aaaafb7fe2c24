"""The paper's settings: ImageNet and COCO, published weights, 300 epochs from scratch."""

from __future__ import annotations

from dataclasses import replace

from ltm.detection.settings import RECIPES
from ltm.training.recipes import FINETUNE, SCRATCH
from ltm.training.settings import OptimSettings, TrainSettings, TuneSettings
from reproduction.paper_numbers import printed_shares
from reproduction.scales.base import Backbone, Layered, Network, Scale, Sources

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
    coco = sources.coco or "coco"
    transfer = replace(
        networks["vit_base"].tune,
        data=replace(networks["vit_base"].tune.data, source=sources.transfer or "hf:cifar100"),
        optim=OptimSettings(epochs=20, lr=1e-4, lr_warmup_epochs=1.0, weight_decay=0.05),
        tune=TuneSettings(),
    )
    ratios = tuple(round(0.95 - 0.05 * step, 2) for step in range(12))
    return Scale(
        name="paper",
        seeds=(0, 1, 2),
        ratio=0.7,
        peer_ratio=0.75,
        finetune=tuple(networks[name] for name in _FINETUNE),
        finetune_epochs=(1, 5, 10, 25, 50),
        scratch=tuple(networks.values()),
        pruning="EfficientViT-B1 [r224]",
        pruning_steps=5000,
        sweep=networks["vit_base"],
        sweep_scratch=networks["vit_base"],
        ratios=ratios,
        scratch_ratios=ratios,
        bottleneck=tuple(
            networks[name] for name in ("mobilevit_s", "efficientvit_b1_r224", "vit_base")
        ),
        bottleneck_epochs=(1, 10, 50),
        by_layer=Layered(network=networks["mobilevit_s"], num_layers=9),
        layers=Layered(network=networks["mobilevit_s"], num_layers=9),
        layer_share=0.7,
        layer_ratios=(0.3, 0.5, 0.7, 0.9),
        layer_epochs=50,
        losses=tuple(
            networks[name] for name in ("mobilevit_xs", "mobilevit_s", "efficientvit_b1_r224")
        ),
        heatmap=networks["mobilevit_s"],
        lora=networks["vit_base"],
        transfer=networks["vit_base"],
        transfer_tune=transfer,
        races=tuple(networks[name] for name in ("vit_small", "vit_base", "swin_tiny")),
        batch_sizes=(1, 8, 32, 128, 512),
        table_batch=128,
        race_mode="cudagraph",
        race_dtype="fp16",
        race_rounds=30,
        detectors=(
            Backbone(label="MobileNetv3", stands_for="MobileNetv3", name="mobilenetv3_large_100"),
            Backbone(label="MobileNetv2", stands_for="MobileNetv2", name="mobilenetv2_100"),
            Backbone(label="MobileNetv1", stands_for="MobileNetv1", name="mobilenetv1_100"),
            Backbone(label="MixNet", stands_for="MixNet", name="mixnet_m"),
            Backbone(label="MNASNet", stands_for="MNASNet", name="mnasnet_100"),
            Backbone(
                label="MobileViT-XS", stands_for="MobileViT-XS", name="mobilevit_xs", merges=True
            ),
            Backbone(
                label="MobileViT-S", stands_for="MobileViT-S", name="mobilevit_s", merges=True
            ),
            Backbone(
                label="EfficientViT", stands_for="EfficientViT", name="efficientvit_b1", merges=True
            ),
        ),
        detection=replace(
            RECIPES["ssdlite"],
            data=replace(RECIPES["ssdlite"].data, source=coco),
            detector=replace(RECIPES["ssdlite"].detector, pretrained=True),
            run=replace(RECIPES["ssdlite"].run, precision="bf16"),
        ),
        segmenters=(
            Backbone(label="EViT", stands_for="EViT", name="efficientvit_m4"),
            Backbone(
                label="EfficientViT-B1",
                stands_for="EfficientViT-B1",
                name="efficientvit_b1",
                merges=True,
            ),
        ),
        segmentation=replace(
            RECIPES["mask_rcnn"],
            data=replace(RECIPES["mask_rcnn"].data, source=coco),
            detector=replace(RECIPES["mask_rcnn"].detector, pretrained=True),
            run=replace(RECIPES["mask_rcnn"].run, precision="bf16"),
        ),
    )


def _network(name: str, data: str) -> Network:
    scratch, tune = (_on(recipes[name], data) for recipes in (SCRATCH, FINETUNE))
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
