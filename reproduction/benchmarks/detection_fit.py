"""Train a detector for some minutes, and score it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ltm.detection.score import coco_results, coco_scores
from reproduction.benchmarks.detection_data import Pictures

Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How to train; `steps` or `seconds` say how long."""

    lr: float
    batch_size: int
    steps: int | None = None
    seconds: float = 0.0
    flips: bool = False
    weight_decay: float = 0.01
    clip: float = 5.0
    warmup: float = 0.05
    least_lr: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Fit:
    """What a training did."""

    steps: int
    seconds: float
    losses: list[float]
    """Mean training loss over twenty stretches of the run."""


def fit(
    model: nn.Module,
    pictures: Pictures,
    recipe: Recipe,
    say: Say,
    look: Callable[[], object] | None = None,
) -> Fit:
    """Train a detector; `look` is called at half of the run."""
    device = next(model.parameters()).device
    optimizer = _optimizer(model, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    order: list[int] = []
    curve: list[list[Tensor]] = [[] for _ in range(20)]
    start, looked, lost, step = time.perf_counter(), False, 0.0, 0
    model.train()
    while True:
        done = _progress(recipe, step, time.perf_counter() - start - lost)
        if done >= 1:
            break
        while len(order) < recipe.batch_size:
            order += torch.randperm(len(pictures.images), generator=generator).tolist()
        places, order = order[: recipe.batch_size], order[recipe.batch_size :]
        flips = (torch.rand(len(places), generator=generator) < 0.5 * recipe.flips).tolist()
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * _schedule(done, recipe)
        loss = _step(model, optimizer, pictures.batch(places, flips), recipe.clip, device)
        curve[min(19, int(20 * done))].append(loss)
        step += 1
        if step in (1, 10, 50) or step % 200 == 0:
            spent = time.perf_counter() - start - lost
            say(f"  step {step}: loss {float(loss):.4f}, {step / spent:.2f} steps/s, {done:.0%}")
            if not math.isfinite(float(loss)):
                raise ValueError(f"the loss is {float(loss)} at step {step}")
        if look is not None and done >= 0.5 and not looked:
            looked = True
            before = time.perf_counter()
            look()
            model.train()
            lost += time.perf_counter() - before
    seconds = time.perf_counter() - start - lost
    means = [float(torch.stack(values).mean()) for values in curve if values]
    return Fit(step, seconds, means)


def steps_within(
    make: Sequence[Callable[[], nn.Module]], pictures: Pictures, recipe: Recipe, seconds: float
) -> int:
    """How many steps all of some detectors can do in a time: that of the slowest."""
    slowest = 0.0
    for build in make:
        model = build()
        optimizer = _optimizer(model, recipe)
        device = next(model.parameters()).device
        places = [place % len(pictures.images) for place in range(recipe.batch_size)]
        batch = pictures.batch(places, [False] * len(places))
        model.train()
        times: list[float] = []
        for _ in range(12):
            before = time.perf_counter()
            _step(model, optimizer, batch, recipe.clip, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - before)
        slowest = max(slowest, sum(sorted(times)[:8]) / 8)
        del model, optimizer
    return max(1, int(seconds / slowest))


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[list[Tensor], list[dict[str, Tensor]]],
    clip: float,
    device: torch.device,
) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        losses = model(*batch)
    loss = torch.stack(list(losses.values())).sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach()


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    heavy = [p for p in model.parameters() if p.ndim > 1]
    light = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": heavy}, {"params": light, "weight_decay": 0.0}]
    on_cuda = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=on_cuda)


def _progress(recipe: Recipe, step: int, seconds: float) -> float:
    return seconds / recipe.seconds if recipe.steps is None else step / recipe.steps


def _schedule(done: float, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine."""
    if done < recipe.warmup:
        return max(0.01, done / recipe.warmup)
    share = (done - recipe.warmup) / (1 - recipe.warmup)
    return recipe.least_lr + (1 - recipe.least_lr) * 0.5 * (1 + math.cos(math.pi * share))


@torch.no_grad()
def find(
    model: nn.Module, pictures: Pictures, *, batch_size: int, resized: bool = False
) -> list[dict[str, Any]]:
    """What a detector finds, in COCO's format; boxes of resized images are scaled back."""
    model.eval()
    known = {image["id"]: image for image in pictures.truth["images"]}
    results: list[dict[str, Any]] = []
    for first in range(0, len(pictures.images), batch_size):
        images = pictures.images[first : first + batch_size]
        for offset, found in enumerate(model(images)):
            image_id = int(pictures.targets[first + offset]["image_id"])
            if resized:
                height, width = images[offset].shape[-2:]
                full = known[image_id]
                scale = [full["width"] / width, full["height"] / height] * 2
                found["boxes"] = found["boxes"] * found["boxes"].new_tensor(scale)
            results += coco_results(image_id, found, pictures.category_ids)
    return results


def score(pictures: Pictures, results: list[dict[str, Any]], *, masks: bool) -> dict[str, Any]:
    """Average precision by faster-coco-eval."""
    kinds = {"box": "bbox", **({"mask": "segm"} if masks else {})}
    found: dict[str, Any] = {
        name: asdict(coco_scores(pictures.truth, results, kind))  # pyright: ignore[reportArgumentType]
        for name, kind in kinds.items()
    }
    return {**found, "evaluator": "faster-coco-eval"}
