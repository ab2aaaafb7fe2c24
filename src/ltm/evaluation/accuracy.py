"""How right a network is, how sure of itself, and how close to the original.

All networks see the same batches, so that their differences are paired: image by image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ltm.core.cost import evaluating
from ltm.processes import gather_rows, require_images

_QUANTILE = NormalDist().inv_cdf(0.975)
"""Of intervals of 95%."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Outputs:
    """The outputs of a network: seven numbers for each image. Logits are not kept."""

    label: Tensor
    prediction: Tensor
    among_five: Tensor
    """Whether the label is among the five likeliest classes (or all, if there are fewer)."""
    confidence: Tensor
    """Probability of the prediction."""
    loss: Tensor
    """Cross-entropy."""
    agrees: Tensor
    """Whether the original network predicts the same."""
    divergence: Tensor
    """KL divergence of the output distribution from the original's, in nats."""
    has_original: bool = True

    @property
    def correct(self) -> Tensor:
        """Whether the prediction is the label."""
        return self.prediction == self.label


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One network on one set of images; shares, not per cent."""

    num_images: int
    top1: float
    top1_interval: tuple[float, float]
    """95% (Wilson) for one network alone; to compare two use `paired_interval`."""
    top5: float
    loss: float
    calibration_error: float
    agreement: float | None
    divergence: float | None


def is_at_chance(accuracy: Accuracy, num_classes: int) -> bool:
    """Whether as many images could be right by guessing one of so many classes."""
    return num_classes > 1 and accuracy.top1_interval[0] <= 1 / num_classes


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The accuracy of one network less that of another on the same images."""

    difference: float
    low: float
    high: float
    num_images: int


def evaluate(
    models: Mapping[str, nn.Module],
    batches: Iterable[Any],
    *,
    original: str | None = None,
    labelled: bool = True,
    autocast: torch.dtype | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda batches: batches,
) -> dict[str, Outputs]:
    """Show every batch of `(images, labels)` to every model, and keep the outputs.

    `original` names the model that the others are compared with. If images have no labels, its
    predictions count as right: accuracy is then agreement with it. Each of several processes goes
    through its own batches, and all get the outputs of all.
    """
    _check_models(models, original, labelled=labelled)
    device = next(next(iter(models.values())).parameters()).device
    rows: dict[str, list[Tensor]] = {name: [] for name in models}
    num_images = 0
    with torch.no_grad(), ExitStack() as stack:
        for model in models.values():
            stack.enter_context(evaluating(model))
        if autocast is not None:
            stack.enter_context(torch.autocast(device.type, autocast))
        for batch in progress(batches):
            images, labels = batch[0].to(device), batch[1].to(device)
            num_images += len(labels)
            logits = {name: _logits(model, images) for name, model in models.items()}
            reference = None if original is None else logits[original]
            if reference is not None and not labelled:
                labels = reference.argmax(1)
            for name, values in logits.items():
                rows[name].append(_describe(values, labels, reference))
    require_images(num_images, device)
    return {
        name: _outputs(gather_rows(torch.cat(parts)).cpu(), original is not None)
        for name, parts in rows.items()
    }


def _check_models(models: Mapping[str, nn.Module], original: str | None, *, labelled: bool) -> None:
    if original is not None and original not in models:
        raise ValueError(f"original is {original!r}: it must be one of {', '.join(models)}")
    if original is None and not labelled:
        raise ValueError("original: images without labels need it, to compare the others with")
    if not models:
        raise ValueError("models: there are none; give at least one")


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    weight = next(
        model.parameters(), images
    )  # a file has no parameters, and takes images as they are
    logits = model(images.to(weight.dtype))
    if logits.ndim != 2:
        raise ValueError(f"model: it gives {tuple(logits.shape)}, not one score per class")
    return logits.float()


def _describe(logits: Tensor, labels: Tensor, reference: Tensor | None) -> Tensor:
    """Return one row of numbers per image, all exact in float64."""
    log_probability = logits.log_softmax(-1)
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    prediction = logits.argmax(1)
    reference = logits if reference is None else reference
    columns = (
        labels,
        prediction,
        (best == labels[:, None]).any(1),
        log_probability.gather(1, prediction[:, None])[:, 0].exp(),
        -log_probability.gather(1, labels[:, None])[:, 0],
        prediction == reference.argmax(1),
        kl_divergence(logits, reference),
    )
    return torch.stack([column.double() for column in columns], dim=1)


def kl_divergence(logits: Float[Tensor, "b c"], original: Float[Tensor, "b c"]) -> Tensor:
    """`KL(original || merged)` of the class probabilities, in nats."""
    ours, theirs = (values.float().log_softmax(-1) for values in (logits, original))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def _outputs(rows: Tensor, has_original: bool) -> Outputs:
    label, prediction, among_five, confidence, loss, agrees, divergence = rows.unbind(1)
    return Outputs(
        label=label.long(),
        prediction=prediction.long(),
        among_five=among_five.bool(),
        confidence=confidence.float(),
        loss=loss.float(),
        agrees=agrees.bool(),
        divergence=divergence.float(),
        has_original=has_original,
    )


def summarise(outputs: Outputs) -> Accuracy:
    """Return the row of one network; every image weighs the same."""
    correct = outputs.correct
    return Accuracy(
        num_images=len(correct),
        top1=_mean(correct),
        top1_interval=wilson_interval(int(correct.sum()), len(correct)),
        top5=_mean(outputs.among_five),
        loss=_mean(outputs.loss),
        calibration_error=calibration_error(outputs.confidence, correct),
        agreement=_mean(outputs.agrees) if outputs.has_original else None,
        divergence=_mean(outputs.divergence) if outputs.has_original else None,
    )


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def calibration_error(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> float:
    """Expected calibration error, `sum_b n_b / n |accuracy_b - confidence_b|`, over equal bins."""
    bins = (confidence.double() * num_bins).ceil().long().clamp(1, num_bins) - 1
    gap = torch.zeros(num_bins, dtype=torch.float64)
    gap.index_add_(0, bins, correct.double() - confidence.double())
    return float(gap.abs().sum() / len(confidence))


def paired_interval(correct_a: Tensor, correct_b: Tensor) -> PairedDifference:
    """Accuracy of a less that of b on the same images, with an interval of 95%.

    Only images on which the two differ count. The interval is the normal one with half an image
    added to each of the four outcomes (Agresti and Min, 2005): it stays honest when few differ.
    """
    if correct_a.shape != correct_b.shape or correct_a.ndim != 1 or len(correct_a) == 0:
        raise ValueError(
            f"correct_a and correct_b have shapes {tuple(correct_a.shape)} and "
            f"{tuple(correct_b.shape)}: one value per image, the same images, is needed"
        )
    a, b = correct_a.bool(), correct_b.bool()
    num_images = len(a)
    wins, losses = int((a & ~b).sum()), int((b & ~a).sum())
    total = num_images + 2
    p_win, p_loss = (wins + 0.5) / total, (losses + 0.5) / total
    centre = p_win - p_loss
    spread = ((p_win + p_loss - centre**2) / total) ** 0.5 * _QUANTILE
    return PairedDifference(
        difference=(wins - losses) / num_images,
        low=max(-1.0, centre - spread),
        high=min(1.0, centre + spread),
        num_images=num_images,
    )


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """Wilson's interval of a share."""
    z, share = _QUANTILE, successes / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    spread = z / (1 + z**2 / total) * (share * (1 - share) / total + z**2 / (4 * total**2)) ** 0.5
    return centre - spread, centre + spread
