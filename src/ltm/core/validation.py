"""Checks at the door: a ValueError names the argument, its value and what is allowed."""

import math

import torch
from torch import Tensor


def check_beta(beta: float) -> None:
    """Refuse a temperature that is no positive number."""
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"beta is {beta}: a positive finite number is needed")


def check_floor(floor: float) -> None:
    """Refuse a floor under probabilities that is none."""
    if not 0 <= floor < 1:
        raise ValueError(f"floor is {floor}: a number in [0, 1) is needed")


def check_num_classes(num_classes: int) -> None:
    """Refuse a model of no class."""
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}: at least 1 is needed")


def check_features(name: str, x: Tensor, num_dims: int | None = None) -> None:
    """Refuse an empty batch, an empty feature, and any shape but `num_dims` dimensions."""
    shape = tuple(x.shape)
    if num_dims is not None and x.ndim != num_dims:
        raise ValueError(f"{name} has shape {shape}: {num_dims} dimensions are needed")
    if x.ndim == 0 or x.shape[0] == 0:
        raise ValueError(f"{name} has shape {shape}: a batch of at least one sample is needed")
    if x.numel() == 0:
        raise ValueError(f"{name} has shape {shape}: at least one value per sample is needed")


def check_finite(name: str, x: Tensor) -> None:
    """Refuse NaN and infinity, which would otherwise spread over every class."""
    if not bool(x.isfinite().all()):
        count = int((~x.isfinite()).sum())
        raise ValueError(
            f"{name} has {count} values that are NaN or infinite: only finite ones fit"
        )


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], reason: str) -> None:
    """Refuse a shape that does not fit its neighbours; `reason` says which."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {shape} is needed, {reason}")


def check_labels(labels: Tensor, num_samples: int, num_classes: int) -> None:
    """Refuse labels that are not one whole number in [0, num_classes) per sample."""
    check_shape("labels", labels, (num_samples,), "one per sample")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are of type {labels.dtype}: whole numbers are needed")
    # A compiled or meta graph has no values to look at.
    if torch.compiler.is_compiling() or labels.is_meta:
        return
    low, high = (int(value) for value in labels.aminmax())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels range from {low} to {high}: with {num_classes} classes "
            f"they must lie in 0 to {num_classes - 1}"
        )
