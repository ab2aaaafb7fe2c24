"""Recipes: named settings for the paper's backbones, for distillation, and small ones for a CPU.

The paper trains with a total batch of 1024, and otherwise as each backbone was trained; these are
those settings. Learning rates scale with the batch.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ltm.data.config import AugmentConfig, DataConfig
from ltm.models import did_you_mean
from ltm.training.settings import (
    MergeSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimSettings,
    RunSettings,
    TrainSettings,
    TuneSettings,
    read_settings,
)

BACKBONES = {
    "mobilevit_xs": "mobilevit_xs",
    "mobilevit_s": "mobilevit_s",
    "efficientvit_b1_r224": "efficientvit_b1.r224_in1k",
    "efficientvit_b1_r288": "efficientvit_b1.r288_in1k",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
    "swin_tiny": "swin_tiny_patch4_window7_224",
    "swin_base": "swin_base_patch4_window7_224",
}
"""The paper's backbones, as timm calls them."""

_DATA = DataConfig(source="imagenet", batch_size=256, workers=8)
_GPU = RunSettings(precision="bf16")

_DEIT = OptimSettings(
    epochs=300, lr=1e-3, reference_batch=1024, weight_decay=0.05, lr_warmup_epochs=5.0, min_lr=1e-5
)
_OPTIM = {
    "mobilevit": replace(
        _DEIT, lr=2e-3, weight_decay=0.01, lr_warmup_epochs=7.5, min_lr=2e-4, clip=10.0, ema=0.9995
    ),
    "efficientvit": replace(_DEIT, weight_decay=0.1, lr_warmup_epochs=20.0, clip=2.0, ema=0.9998),
    "vit": replace(_DEIT, clip=1.0),
    "swin": replace(_DEIT, lr_warmup_epochs=20.0, clip=5.0),
}
_TUNING = OptimSettings(epochs=1, lr=5e-3, weight_decay=0.0, min_lr=1e-4)
_DROP_PATH = {"vit_small": 0.1, "vit_base": 0.1, "swin_tiny": 0.2, "swin_base": 0.5}

_CROPS_ONLY = AugmentConfig.light()


def _scratch(backbone: str) -> TrainSettings:
    family = backbone.partition("_")[0]
    # From scratch the paper learns which neighbours merge, as grid networks do by default.
    options = ("support=learned",) if family == "vit" else ()
    return TrainSettings(
        model=ModelSettings(name=BACKBONES[backbone], drop_path=_DROP_PATH.get(backbone, 0.0)),
        merge=MergeSettings(method_options=options, warm_epochs=20),
        data=_DATA,
        augment=AugmentConfig(),
        optim=_OPTIM[family],
        run=_GPU,
    )


def _finetune(backbone: str) -> TrainSettings:
    return TrainSettings(
        model=ModelSettings(name=BACKBONES[backbone], pretrained=True),
        data=_DATA,
        augment=_CROPS_ONLY,
        optim=_TUNING,
        tune=TuneSettings(trainable="mergers"),
        run=_GPU,
    )


_SMALL = {
    "vit": (
        "vit_tiny_patch16_224",
        ("img_size=64", "patch_size=8", "embed_dim=96", "depth=6", "num_heads=3"),
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        (
            "img_size=64",
            "patch_size=4",
            "window_size=4",
            "embed_dim=32",
            "depths=(2,2,2)",
            "num_heads=(2,4,8)",
        ),
    ),
    "mobilevit": ("mobilevit_xxs", ()),
    "efficientvit": ("efficientvit_b0", ()),
}


def _small(family: str) -> TrainSettings:
    """A network that learns generated shapes on a CPU in about a minute."""
    name, arguments = _SMALL[family]
    return TrainSettings(
        model=ModelSettings(name=name, model_args=arguments),
        merge=MergeSettings(
            method_options=("support=matching",) if family == "swin" else (),
            warm_epochs=2,
        ),
        data=DataConfig(
            source="shapes:classes=4,size=64,images=1024,val_images=256",
            image_size=64,
            batch_size=32,
            workers=0,
        ),
        augment=_CROPS_ONLY,
        optim=OptimSettings(epochs=8, lr=1e-3, lr_warmup_epochs=1.0, clip=1.0),
    )


def _small_finetune(family: str) -> TrainSettings:
    return replace(
        _small(family),
        merge=MergeSettings(),
        optim=OptimSettings(epochs=2, lr=1e-2, weight_decay=0.0, min_lr=1e-4),
        tune=TuneSettings(trainable="mergers"),
    )


def _demo(name: str) -> TrainSettings:
    """The training of a network that comes with the package; a few minutes on a GPU."""
    return TrainSettings(
        model=ModelSettings(name=name),
        merge=MergeSettings(method="none"),
        data=DataConfig(
            source="shapes:classes=20,size=224,small=1,images=100000,val_images=2000",
            batch_size=128,
            workers=14,
        ),
        augment=AugmentConfig.none(),
        optim=OptimSettings(epochs=4, optimizer="muon", lr=5e-3, lr_warmup_epochs=0.5, clip=1.0),
        run=_GPU,
    )


_DISTILLING = {
    "mergers": (5e-3, 0.0),
    "norms": (3e-3, 3.0),
    "biases": (1e-3, 0.0),
    "lora": (1e-3, 0.0),
    "all": (5e-5, 10.0),
}
"""The peak learning rate, and the weight of the class tokens' distance, by what trains."""


def distilling(trainable: str) -> str:
    """The name of the recipe that trains a part of the network by distillation."""
    if trainable not in _DISTILLING:
        raise ValueError(f"trainable: got {trainable!r}; choose from {', '.join(_DISTILLING)}")
    return f"distil_{trainable}"


def _distil(trainable: Any) -> TrainSettings:
    """Strong crops and mixup in every batch; both networks see the same images."""
    rate, feature_weight = _DISTILLING[trainable]
    return TrainSettings(
        augment=replace(AugmentConfig.light(), scale=(0.3, 1.0), mixup=1.0),
        optim=OptimSettings(
            epochs=10,
            lr=rate,
            lr_warmup_epochs=0.5,
            weight_decay=0.0,
            min_lr=1e-7,
            clip=1.0,
        ),
        objective=ObjectiveSettings(teacher="self", feature_weight=feature_weight),
        tune=TuneSettings(trainable=trainable),
    )


_GENERAL = "general"
"""The recipe of models without one of their own."""

SMALLEST = "shapes_vit"
"""The recipe if neither a recipe nor a model is given."""

SCRATCH = {
    **{name: _scratch(name) for name in BACKBONES},
    **{f"shapes_{family}": _small(family) for family in _SMALL},
    "demo_vit": _demo("demo_vit"),
    _GENERAL: TrainSettings(
        merge=MergeSettings(warm_epochs=5), optim=replace(_DEIT, epochs=100, clip=1.0)
    ),
}
"""From scratch, by name: what `ltm train --recipe` takes."""

FINETUNE = {
    **{name: _finetune(name) for name in BACKBONES},
    **{f"shapes_{family}": _small_finetune(family) for family in _SMALL},
    **{distilling(trainable): _distil(trainable) for trainable in _DISTILLING},
    _GENERAL: TrainSettings(
        augment=_CROPS_ONLY,
        optim=_TUNING,
        tune=TuneSettings(trainable="mergers"),
    ),
}
"""Fine-tuning, by name: what `ltm finetune --recipe` takes."""


def recipe_of(model: str) -> str:
    """The recipe of a timm model: its own if it is one of the paper's, else the general one."""
    for recipe, name in BACKBONES.items():
        if model in (name, name.partition(".")[0]):
            return recipe
    return _GENERAL


def find_recipe(name: str, recipes: Mapping[str, TrainSettings]) -> TrainSettings:
    """A recipe by name; for an unknown one, a ValueError suggests others."""
    if name not in recipes:
        raise ValueError(f"no recipe is named {name}: {did_you_mean(name, recipes)}")
    return recipes[name]


def starting_settings(
    recipes: Mapping[str, TrainSettings],
    *,
    recipe: str | None = None,
    config: str | Path | None = None,
    model: str | None = None,
    method: str | None = None,
) -> TrainSettings:
    """The settings before any option: those of a recipe, changed by a YAML file.

    The default is the recipe of the model. Arguments of a recipe's own model are dropped for
    another model, and options of its own method for another method.
    """
    recipe = recipe or (recipe_of(model) if model else SMALLEST)
    settings = find_recipe(recipe, recipes)
    if config is not None:
        settings = read_settings(config, settings)
    if model not in (None, settings.model.name):
        settings = replace(settings, model=replace(settings.model, model_args=()))
    if method not in (None, settings.merge.method):
        settings = replace(settings, merge=replace(settings.merge, method_options=()))
    return settings
