"""Classification: the `Task` of `ltm train` and `ltm finetune`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltm.api import (
    Record,
    collect_statistics_,
    conversion_of,
    fit_,
    is_merging,
    measure_share,
    observe_,
    report,
    statistical_mergers,
    watching,
)
from ltm.core.bottleneck import BETA, InformationBottleneck, image_features, information_bottleneck
from ltm.core.cost import evaluating
from ltm.core.finite import NonFiniteError, is_finite, require_finite
from ltm.data.datasets import Splits, open_splits
from ltm.data.images import ImageDataset
from ltm.data.loading import Batch, Loader, evaluation_loader, training_loader
from ltm.data.transforms import BatchMixup
from ltm.evaluation.bottleneck import pooled_feature
from ltm.interruption import stepwise
from ltm.methods.base import Site
from ltm.models import Say, name_of
from ltm.processes import gather_objects, sum_over_processes
from ltm.training.fabric import Fabric, in_step
from ltm.training.network import (
    Built,
    build,
    convert_,
    count_classes,
    count_parameters,
    method_config,
    method_of,
    save_model,
    spec_of,
)
from ltm.training.non_finite import NonFiniteLossError, find_non_finite
from ltm.training.objective import (
    Objective,
    forget_sums_,
    refresh_statistics_,
    take_statistics_,
)
from ltm.training.settings import TrainSettings, with_options
from ltm.training.task import BatchLoss, EpochRow, Means, Outcome, Panel, Step, Task
from ltm.training.trainable import choose_trainable_

FITTING_IMAGES = 256
"""Training images, spread over all classes, for methods that are fitted after training."""
_BOTTLENECK_IMAGES = 2000
"""The information bottleneck is measured on the first of the held-out images."""


@dataclass(frozen=True, kw_only=True)
class ClassificationRow(EpochRow):
    """One epoch of a classifier."""

    train_top1: float | None
    """None where batches are mixed."""
    val_loss: float
    val_top1: float
    ib_loss: float | None
    ib_bound: float | None
    mac_share: float | None
    """Share of the original MACs; the mean of the epoch where it differs between images."""
    tokens: str
    """Tokens after each merging site."""

    panels: ClassVar[Sequence[Panel]] = (
        Panel("cross-entropy", {"training": "train_loss", "validation": "val_loss"}),
        Panel("validation top-1 (%)", {"top-1": "val_top1"}, 100.0),
    )

    @property
    def score(self) -> float | None:
        return self.val_top1 if math.isfinite(self.val_loss) else None

    @property
    def remark(self) -> str:
        return f"last epoch: {self._bottleneck()}  tokens {self.tokens}".rstrip()

    def numbers(self) -> list[str]:
        parts = [f"val loss {self.val_loss:.4f}", f"top-1 {100 * self.val_top1:.2f}"]
        parts += [] if self.ib_loss is None else [self._bottleneck()]
        return parts if self.mac_share is None else [*parts, f"MACs {self.mac_share:.3f}"]

    def _bottleneck(self) -> str:
        if self.ib_loss is None or self.ib_bound is None:
            return ""
        return f"IB {self.ib_loss:.3f} bound {self.ib_bound:.3f}"


class Classification(Task):
    """Labelled images, cross-entropy and what the settings add to it, and top-1 accuracy."""

    settings: TrainSettings
    row_type = ClassificationRow

    def __init__(
        self,
        settings: TrainSettings,
        *,
        model: nn.Module | None = None,
        splits: Splits | None = None,
    ) -> None:
        """The task of a run; `model` and `splits` take the place of those that settings name."""
        if model is not None:
            settings = with_options(settings, {"name": name_of(model)})
        super().__init__(settings)
        self._given_model, self._given_splits = model, splits
        self._new_head: frozenset[str] = frozenset()

    def check(self) -> None:
        if self._given_model is None:
            return
        if self.settings.run.strategy == "fsdp":
            raise ValueError("strategy is fsdp, which needs a model made by the run; use ddp")
        require_finite(self._given_model.state_dict(), "model: ")

    def open_data(self) -> None:
        self.splits = self._given_splits or open_splits(self.settings.data)
        found, given = self.splits.train, self._given_model
        if given is None:
            self.num_classes = count_classes(self.settings.model, found.class_names)
        else:
            self.num_classes = int(getattr(given, "num_classes", 0) or found.num_classes)
            if self.num_classes < found.num_classes:
                raise ValueError(
                    f"the network has {self.num_classes} classes, but the data have "
                    f"{found.num_classes}: give it a head for them"
                )

    def build(self, say: Say) -> nn.Module:
        settings = self.settings
        if self._given_model is None:
            built = build(settings, self.num_classes, say)
        else:
            built = Built(self._given_model)
            convert_(built.model, settings, method_config(settings.merge))
        choose_trainable_(built.model, settings.tune, built.new_head)
        if settings.run.grad_checkpointing:
            built.model.set_grad_checkpointing(True)  # type: ignore[operator]
        self._new_head = built.new_head
        return built.model

    def rebuild(self) -> nn.Module:
        untouched = replace(self.settings.model, pretrained=False, weights=None)
        return build(replace(self.settings, model=untouched), self.num_classes).model

    def describe(self, model: nn.Module) -> Iterator[str]:
        name, merge, epochs = self.settings.model.name, self.settings.merge, self.settings.optim
        trained, total = count_parameters(model)
        if trained < total:
            yield f"{name}: {trained:,} of {total:,} parameters train"
        else:
            yield f"{name}: {total:,} parameters"
        if is_merging(model):
            yield str(report(model))
            if merge.warm_epochs >= epochs.epochs:
                yield (
                    f"warm_epochs is {merge.warm_epochs}: none of {epochs.epochs} epochs merges "
                    "tokens, and the scores are those of the network without merging"
                )
        yield from self.describe_head()
        if self._starts_at_random and trained < total:
            yield (
                "warning: the network has random weights, and most of them do not train; "
                "give --pretrained or --weights"
            )

    def describe_head(self) -> Iterator[str]:
        """A line about the head, if it is new or has more classes than the data."""
        if self._new_head:
            yield f"the head is new, for {self.num_classes} classes, and trains"
        elif self.num_classes > (found := self.splits.train.num_classes):
            yield (
                f"the head keeps its {self.num_classes} classes, as the folders are numbered by "
                f"class; --num-classes {found} makes a new one"
            )

    @property
    def _starts_at_random(self) -> bool:
        model = self.settings.model
        return self._given_model is None and model.weights is None and not model.pretrained

    def start(self, fabric: Fabric, model: nn.Module) -> Loader:
        settings, spec = self.settings, spec_of(self.settings, model)
        self.fabric = fabric
        place: dict[str, Any] = {
            "device": fabric.device,
            "rank": fabric.global_rank,
            "world_size": fabric.world_size,
        }
        self.objective = Objective(model, settings.objective, smoothing=settings.augment.smoothing)
        self.mixup = None
        if settings.augment.mixes:
            self.mixup = BatchMixup(
                settings.augment, self.num_classes, seed=settings.run.seed, rank=fabric.global_rank
            )
        self.held_out = evaluation_loader(self.splits.val, spec, settings.data, **place)
        self._clean = lambda: self._first_clean(fabric, model, place)
        return training_loader(
            self.splits.train,
            spec,
            settings.data,
            settings.augment,
            seed=settings.run.seed,
            **place,
        )

    def before_epoch_(self, model: nn.Module) -> bool:
        """Collect class statistics for sites without any, in two passes over clean images."""
        forget_sums_(model)
        if all(merger.active for merger in statistical_mergers(model)):
            return False
        with self.fabric.autocast():
            try:
                collect_statistics_(model, self._clean(), passes=2, progress=stepwise)
            except NonFiniteError as error:
                if self.fabric.world_size > 1:  # a forward may wait for the other processes
                    raise
                place = find_non_finite(model, next(iter(self._clean())).images)
                raise NonFiniteLossError(f"{error}; {place}") from error
        return True

    def after_epoch_(self, model: nn.Module) -> bool:
        """Q(t) and centroids(t), from the epoch's own batches or from clean images after it."""
        if not statistical_mergers(model):
            return False
        if self.settings.statistics_from_epoch:
            take_statistics_(model)
        else:
            with self.fabric.autocast():
                refresh_statistics_(model, stepwise(self._clean()))
        return True

    def loss(self, forward: nn.Module, batch: Batch, step: Step) -> BatchLoss:
        images, labels = batch
        targets = labels
        if self.mixup is not None:
            images, targets = self.mixup(images, labels, epoch=step.epoch, step=step.number)
        watch = step.merging and self.settings.statistics_from_epoch
        watch = watch and bool(statistical_mergers(self.objective.model))
        losses = self.objective(forward, images, targets, merging=step.merging, watch=watch)
        if watch:
            observe_(losses.records, labels)
        correct = (losses.logits.detach().argmax(dim=1) == labels).sum()
        logged = {"loss": losses.cross_entropy, "correct": correct}
        if losses.share is not None:
            logged["mac_share"] = losses.share
        return BatchLoss(
            total=losses.total, logged=logged, inputs=(images,), num_images=len(labels)
        )

    def progress_text(self, means: Means) -> str:
        top1 = means.total("correct") / means.num_images
        return f"loss {means.mean('loss'):.3f}  top-1 {100 * top1:.1f}"

    def evaluate(self, model: nn.Module) -> Evaluation:
        return evaluate(model, self.held_out, self.num_classes, self.fabric)

    def row(
        self, common: dict[str, Any], means: Means, model: nn.Module, found: Evaluation
    ) -> ClassificationRow:
        top1 = means.total("correct") / means.num_images
        return ClassificationRow(
            **self.with_merging(common, means, model),
            train_top1=None if self.mixup is not None else top1,
            val_loss=found.loss,
            val_top1=found.top1,
            ib_loss=found.ib_loss,
            ib_bound=found.ib_bound,
        )

    def with_merging(
        self, common: dict[str, Any], means: Means, model: nn.Module
    ) -> dict[str, Any]:
        """Columns of any classifier: also the training loss, and what merging keeps."""
        loss, share, tokens = means.mean("loss"), None, ""
        assert loss is not None
        if common["merging"]:
            done, share = report(model), means.mean("mac_share")
            share = done.share if share is None else share
            tokens = " ".join(_tokens_left(site) for site in done.sites if site.merges)
        return {**common, "train_loss": loss, "mac_share": share, "tokens": tokens}

    def keeps_last(self, model: nn.Module) -> bool:
        """The last network is kept where the method is fitted after training."""
        return is_merging(model) and conversion_of(model).config.needs_images()

    def finish_(self, model: nn.Module, kept: EpochRow, rows: Sequence[EpochRow]) -> Outcome:
        last = rows[-1]
        assert isinstance(kept, ClassificationRow)
        assert isinstance(last, ClassificationRow)
        metrics: dict[str, Any] = {
            "model": self.settings.model.name,
            "method": method_of(model),
            "top1": kept.val_top1,
            "loss": kept.val_loss,
            "last_top1": last.val_top1,
            "ib_loss": kept.ib_loss,
            "ib_bound": kept.ib_bound,
            "mac_share": kept.mac_share,
            "num_classes": self.num_classes,
        }
        if self.keeps_last(model):
            metrics |= self._meet_budget_(model)

        names = self.splits.train.class_names
        return Outcome(
            metrics=metrics,
            line=f"top-1 {100 * metrics['top1']:.2f}",
            write=lambda folder: save_model(model, folder / "model", class_names=names),
        )

    def _meet_budget_(self, model: nn.Module) -> dict[str, Any]:
        """Fit the method on training images without labels, and evaluate again."""
        self.fit_(model)
        held_out, found = self._spread_images(self.splits.val, model), self.evaluate(model)
        return {
            "top1": found.top1,
            "loss": found.loss,
            "ib_loss": found.ib_loss,
            "ib_bound": found.ib_bound,
            "mac_share": measure_share(model, held_out),
        }

    def fit_(self, model: nn.Module) -> None:
        """Fit the method to a few training images, whatever their labels."""
        images = self._spread_images(self.splits.train, model)
        fit_(model, images, batch_size=self.settings.data.batch_size)

    def _spread_images(self, dataset: ImageDataset, model: nn.Module) -> Tensor:
        """A few images of all classes, the same in every process, so that all decide alike."""
        few, spec = dataset.take(FITTING_IMAGES), spec_of(self.settings, model)
        loader = evaluation_loader(few, spec, self.settings.data, device=self.fabric.device)
        return torch.cat([batch.images for batch in loader])

    def _first_clean(
        self, fabric: Fabric, model: nn.Module, place: dict[str, Any]
    ) -> _FirstBatches:
        """Training images as evaluation sees them, for class statistics."""
        settings, wanted = self.settings, self.settings.merge.statistics_images
        subset = self.splits.train.take(wanted)
        if settings.run.strategy == "fsdp" and len(subset) < fabric.world_size:
            raise ValueError(
                f"statistics_images: {len(subset)} images are too few for {fabric.world_size} "
                "processes that share a network; give at least as many"
            )
        loader = evaluation_loader(subset, spec_of(settings, model), settings.data, **place)
        together = settings.data.batch_size * fabric.world_size
        number = -(-wanted // together)
        if settings.run.strategy == "fsdp":
            # A sharded network runs in all processes at once: all need equally many batches.
            number = min(number, len(subset) // together)
        return _FirstBatches(loader, number)


class _FirstBatches:
    """The first batches of a loader, from the start each time; each process has at least one."""

    def __init__(self, loader: Iterable[Batch], num_batches: int) -> None:
        self._loader, self._num_batches = loader, max(1, num_batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(islice(self._loader, self._num_batches))


def _tokens_left(site: Site) -> str:
    return f"{site.grid_out[0]}x{site.grid_out[1]}" if site.grid_out else str(site.num_out)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A network on held-out images; the bottleneck is that of its last merging site."""

    loss: float
    top1: float
    num_images: int
    ib_loss: float | None = None
    ib_bound: float | None = None


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], num_classes: int, fabric: Fabric
) -> Evaluation:
    """Evaluate on the images of all processes, which may have different numbers of them."""
    sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)
    watches = is_merging(model)
    features = _Features(num_classes, fabric)
    with evaluating(model):
        for (images, labels), counts in in_step(batches, fabric):
            with ExitStack() as stack:
                stack.enter_context(fabric.autocast())
                watch = watches and features.wanted
                records = stack.enter_context(watching(model)) if watch else []
                logits = model(images).float()
            if not counts:
                continue
            features.add(records, images, labels)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            correct = (logits.argmax(dim=1) == labels).sum()
            sums += torch.stack([loss.double(), correct.double(), sums.new_tensor(len(labels))])
    loss, correct, count = sum_over_processes(sums).tolist()
    bottleneck = features.bottleneck()
    return Evaluation(
        loss=loss / max(count, 1),
        top1=correct / max(count, 1),
        num_images=int(count),
        ib_loss=None if bottleneck is None else float(bottleneck.loss),
        ib_bound=None if bottleneck is None else float(bottleneck.bound),
    )


class _Features:
    """Merged features and inputs of the first images, gathered over the processes.

    This process sees image number `rank`, and every `world_size`-th image after it.
    """

    def __init__(self, num_classes: int, fabric: Fabric) -> None:
        self._num_classes, self._device = num_classes, fabric.device
        self._places = range(fabric.global_rank, _BOTTLENECK_IMAGES, fabric.world_size)
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def wanted(self) -> bool:
        return sum(len(labels) for *_, labels in self._parts) < len(self._places)

    def add(self, records: Iterable[Record], images: Tensor, labels: Tensor) -> None:
        merging = [record for record in records if record.decision is not None]
        if merging:
            last = merging[-1]
            k = 0 if last.merger is None else last.merger.site.num_prefix
            self._parts.append((pooled_feature(last, k), image_features(images).half(), labels))

    def bottleneck(self) -> InformationBottleneck | None:
        """The bottleneck of all processes' images; all processes have to call it."""
        found = [rows for rows in gather_objects(self._rows()) if rows is not None]
        if not found:
            return None
        places, *rows = (torch.cat(parts) for parts in zip(*found, strict=True))
        order = places.argsort()  # the same order, and rounding, with any number of processes
        merged, inputs, labels = (part[order].to(self._device) for part in rows)
        if not is_finite(merged):
            return None
        return information_bottleneck(merged, inputs, labels, self._num_classes, BETA)

    def _rows(self) -> tuple[Tensor, ...] | None:
        """This process's images: their places among all, features, inputs and labels."""
        if not self._parts:
            return None
        most = len(self._places)
        own = [torch.cat(parts)[:most].cpu() for parts in zip(*self._parts, strict=True)]
        return torch.tensor(self._places[: len(own[0])]), *own
