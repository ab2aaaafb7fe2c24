"""Parameter groups, optimiser, learning rate and averaged weights: timm's, put together."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from ltm.api import conversion_of, is_merging, mergers
from ltm.methods import MethodConfig
from ltm.models import did_you_mean
from ltm.training.settings import OptimSettings
from ltm.training.trainable import in_merger


def effective_lr(settings: OptimSettings, total_batch: int) -> float:
    """The learning rate for a total batch, over all processes and accumulated batches."""
    if not settings.reference_batch:
        return settings.lr
    return settings.lr * total_batch / settings.reference_batch


def make_optimizer(model: nn.Module, settings: OptimSettings, total_batch: int) -> Optimizer:
    """An optimiser of the parameters that train, in groups."""
    known = [str(name) for name in list_optimizers()]
    if settings.optimizer not in known:
        raise ValueError(
            f"no optimizer is named {settings.optimizer}: {did_you_mean(settings.optimizer, known)}"
        )
    lr = effective_lr(settings, total_batch)
    groups = parameter_groups(model, settings, lr)
    return create_optimizer_v2(
        groups,
        opt=settings.optimizer,
        lr=lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
    )


def parameter_groups(model: nn.Module, settings: OptimSettings, lr: float) -> list[dict[str, Any]]:
    """Groups by learning rate and weight decay; timm's schedulers use `lr_scale` as a factor."""
    spared: set[str] = set(getattr(model, "no_weight_decay", set)())
    method = conversion_of(model).config if is_merging(model) else None
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own_lr = _learning_rate(name, settings, lr, method)
        decays = parameter.ndim > 1 and name not in spared and not in_merger(name)
        key = (own_lr, settings.weight_decay if decays else 0.0)
        group = groups.setdefault(
            key, {"params": [], "lr_scale": own_lr / lr, "weight_decay": key[1]}
        )
        group["params"].append(parameter)
    return list(groups.values())


def _learning_rate(
    name: str, settings: OptimSettings, lr: float, method: MethodConfig | None
) -> float:
    if not in_merger(name) or method is None:
        return lr
    own = method.learning_rate(f".{name}".partition(".merger.")[2])
    if own is not None:
        return own
    return lr if settings.merger_lr is None else settings.merger_lr


def make_schedule(
    optimizer: Optimizer, settings: OptimSettings, updates_per_epoch: int, lr: float
) -> Scheduler:
    """The learning rate of every update (`step_update`); its only state is their number."""
    # A constant rate is a cosine from lr to lr, after the same warm-up.
    least = settings.min_lr if settings.schedule == "cosine" else lr
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=settings.epochs,
        min_lr=min(least, lr),
        warmup_lr=lr * 1e-3,
        warmup_epochs=settings.lr_warmup_epochs,  # pyright: ignore[reportArgumentType]
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    assert schedule is not None, "timm knows cosines"
    return schedule


class AveragedWeights(ModelEmaV3):
    """timm's moving average of weights and running statistics, but not of class statistics.

    Class statistics are replaced as a whole once per epoch; their average would mean nothing.
    """

    @torch.no_grad()
    def follow_statistics(self, model: nn.Module) -> None:
        """Copy the class statistics of the network."""
        current = dict(mergers(model))
        for name, merger in mergers(self.module):
            theirs = dict(current[name].named_buffers())
            for key, buffer in merger.named_buffers():
                buffer.copy_(theirs[key])
        self.module.eval()
