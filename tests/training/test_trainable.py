"""Which parameters train, and what stays as it is."""

import copy

import pytest
import timm
import torch
from torch import nn

import ltm
from ltm.api import mergers
from ltm.training.optimisation import (
    AveragedWeights,
    effective_lr,
    make_optimizer,
    make_schedule,
)
from ltm.training.settings import OptimSettings, TuneSettings
from ltm.training.trainable import (
    annealed_noise,
    choose_trainable_,
    chosen_parameters,
    set_noise_,
    train_mode_,
)


def vit(method: object = None) -> nn.Module:
    model = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=3,
        img_size=32,
        patch_size=8,
        embed_dim=16,
        depth=3,
        num_heads=2,
    )
    ltm.merge_tokens_(model, method or ltm.LTM(support=ltm.Learned(), per_block=0.8))  # type: ignore[arg-type]
    return model


def mobilevit() -> nn.Module:
    model = timm.create_model("mobilevit_xxs", num_classes=3)
    ltm.merge_tokens_(model, ltm.LTM(per_block=0.5), 64)
    return model


def test_normalisation_layers_train_alone_where_mask_modules_have_nothing_to_learn() -> None:
    model = vit(ltm.LTM(per_block=0.8, weights="uniform"))
    chosen = chosen_parameters(model, TuneSettings(trainable="norms"))
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    assert chosen == norms
    assert "blocks.0.norm1.weight" in norms
    assert "norm.bias" in norms


def test_only_mask_modules_move_and_running_statistics_stay() -> None:
    model = mobilevit()
    choose_trainable_(model, TuneSettings(trainable="mergers"))
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model, OptimSettings(lr=0.1, weight_decay=0.1), 4)
    for _ in range(2):
        train_mode_(model)
        model(torch.randn(4, 3, 64, 64)).square().sum().backward()
        optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert moved
    assert all(".merger." in name for name in moved)


def test_normalisation_trains_with_its_own_parameters() -> None:
    model = mobilevit()
    choose_trainable_(model, TuneSettings(trainable="mergers", unfreeze=("stem.*",)))
    train_mode_(model)
    assert model.stem.bn.training  # type: ignore[union-attr]
    assert not model.final_conv.bn.training  # type: ignore[union-attr]
    assert all(merger.training for _, merger in mergers(model))
    choose_trainable_(model, TuneSettings())
    train_mode_(model)
    assert all(module.training for module in model.modules())


def test_patterns_unfreeze_and_wrong_ones_are_named() -> None:
    model = vit()
    chosen = chosen_parameters(model, TuneSettings(trainable="mergers", unfreeze=("head.*",)))
    assert {"head.weight", "head.bias"} < chosen
    assert all(".merger." in name for name in chosen - {"head.weight", "head.bias"})
    with pytest.raises(ValueError, match=r"'heads\.\*' matches no parameter; did you mean head"):
        chosen_parameters(model, TuneSettings(trainable="mergers", unfreeze=("heads.*",)))


def test_a_method_without_parameters_has_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="nothing would train"):
        choose_trainable_(vit(ltm.ToMe(per_block=0.8)), TuneSettings(trainable="mergers"))


def test_groups_have_their_own_rates_and_masks_do_not_decay() -> None:
    model = vit(ltm.LTMP(per_block=0.8))
    settings = OptimSettings(lr=2e-3, min_lr=2e-4, weight_decay=0.3, epochs=2, merger_lr=1e-2)
    optimizer = make_optimizer(model, settings, 4)
    rate = {p: 2e-3 * g["lr_scale"] for g in optimizer.param_groups for p in g["params"]}
    decay = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        kinds = {"merge_threshold": 5e-3, "prune_threshold": 5e-6}
        assert rate[parameter] == pytest.approx(kinds.get(name.rpartition(".")[2], 2e-3))
        plain = parameter.ndim > 1 and name not in ("pos_embed", "cls_token")
        assert decay[parameter] == (0.3 if plain else 0.0)
    schedule = make_schedule(optimizer, settings, updates_per_epoch=10, lr=2e-3)
    for updates, share in ((0, 1.0), (10, 0.55), (20, 0.1)):
        schedule.step_update(updates)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(share * 2e-3 * group["lr_scale"])


def test_the_rate_scales_with_the_batch() -> None:
    settings = OptimSettings(lr=1e-3, reference_batch=1024)
    optimizer = make_optimizer(vit(), settings, 256)
    schedule = make_schedule(
        optimizer, OptimSettings(schedule="constant"), 10, effective_lr(settings, 256)
    )
    schedule.step_update(3)
    assert {group["lr"] for group in optimizer.param_groups} == {2.5e-4}
    with pytest.raises(ValueError, match="no optimizer is named adamv: did you mean"):
        make_optimizer(vit(), OptimSettings(optimizer="adamv"), 4)


def test_a_constant_rate_warms_up_too() -> None:
    settings = OptimSettings(lr=1e-3, epochs=3, schedule="constant", lr_warmup_epochs=1.0)
    optimizer = make_optimizer(vit(), settings, 4)
    schedule = make_schedule(optimizer, settings, updates_per_epoch=10, lr=1e-3)
    for updates, rate in ((0, 1e-6), (5, 5.005e-4), (10, 1e-3), (20, 1e-3), (29, 1e-3)):
        schedule.step_update(updates)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_noise_falls_to_zero_over_the_merging_epochs() -> None:
    noises = [annealed_noise(2.0, epoch, 2, 7) for epoch in range(7)]
    assert noises == pytest.approx([2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])
    assert annealed_noise(1.0, 0, 0, 1) == 0.0
    model = vit()
    set_noise_(model, 0.25)
    assert {merger.noise for _, merger in mergers(model)} == {0.25}  # type: ignore[union-attr]


def test_averages_follow_class_statistics_as_a_whole() -> None:
    model = vit()
    average = AveragedWeights(model, decay=0.9, use_warmup=True)
    images, labels = torch.randn(9, 3, 32, 32), torch.arange(9) % 3
    ltm.collect_statistics_(model, [(images, labels)])
    average.follow_statistics(model)
    average.update(model, 5)
    for (_, mine), (_, theirs) in zip(mergers(average.module), mergers(model), strict=True):
        assert mine.active
        assert mine.informative.costs.equal(theirs.informative.costs)  # type: ignore[union-attr]
