"""The training loop: Algorithm 1, epoch by epoch.

An epoch depends on nothing but the state before it: order, augmentation, noise and dropout come
from the seed and the epoch's number. So a run that is stopped and resumed repeats itself exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ltm.api import is_merging, merging_off, observe_, report
from ltm.data.loading import Batch, Loader, Lookahead
from ltm.data.sampling import make_key
from ltm.data.transforms import BatchMixup
from ltm.methods.base import Site
from ltm.training.fabric import Fabric, average_running_statistics_, total_over_processes
from ltm.training.log import EpochRow, bottleneck_text
from ltm.training.non_finite import NonFiniteLossError, find_non_finite
from ltm.training.objective import Losses, Objective
from ltm.training.optimisation import (
    AveragedWeights,
    LearningRate,
    effective_lr,
    make_optimizer,
)
from ltm.training.progress import Bar, bar
from ltm.training.settings import TrainSettings
from ltm.training.statistics import (
    forget_sums_,
    needs_statistics,
    refresh_statistics_,
    start_statistics_,
    statistical_mergers,
    take_statistics_,
)
from ltm.training.totals import Clock, Totals
from ltm.training.trainable import annealed_noise, set_noise_, train_mode_
from ltm.training.validation import Evaluation, evaluate

SHOW_EVERY = 20
"""Steps between new numbers beside the bar."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaders:
    """The images of a run: training, held out, and the first clean ones of the training set."""

    train: Loader
    val: Loader
    clean: Callable[[], Iterable[Batch]]
    num_classes: int


class Trainer:
    """A network in training: what changes from epoch to epoch, and how."""

    def __init__(
        self,
        fabric: Fabric,
        settings: TrainSettings,
        model: nn.Module,
        loaders: Loaders,
        console: Console,
    ) -> None:
        self.fabric, self.settings, self.loaders, self.console = fabric, settings, loaders, console
        optim = settings.optim
        total_batch = settings.data.batch_size * fabric.world_size * optim.accumulate
        self.objective = Objective(model, settings.objective, smoothing=settings.augment.smoothing)
        self.forward = fabric.setup_module(model)
        self.model = model
        optimizer = make_optimizer(model, optim, total_batch)
        self.optimizer: Any = fabric.setup_optimizers(optimizer)
        self.updates_per_epoch = -(-len(loaders.train) // optim.accumulate)
        self.lr = LearningRate(
            optimizer, optim, self.updates_per_epoch, effective_lr(optim, total_batch)
        )
        self.average = AveragedWeights(model, optim.ema) if optim.ema else None
        self.mixup = None
        if settings.augment.mixes:
            self.mixup = BatchMixup(
                settings.augment,
                loaders.num_classes,
                seed=settings.run.seed,
                rank=fabric.global_rank,
            )
        self.updates = 0
        self._batches: Lookahead[Batch] = Lookahead(())
        self.remark = ""
        """What the bar says besides the running means."""

    @property
    def evaluated(self) -> nn.Module:
        """The network that counts: with averaged weights, if they are kept."""
        return self.model if self.average is None else self.average.model

    def merges_in(self, epoch: int) -> bool:
        """Whether tokens are merged in an epoch, counted from 0."""
        return is_merging(self.model) and epoch >= self.settings.merge.warm_epochs

    def run_epoch(self, epoch: int) -> EpochRow:
        """Train for one epoch (from 0), refresh the class statistics, evaluate."""
        merging, clock = self.merges_in(epoch), Clock(self.fabric.device)
        torch.manual_seed(make_key(self.settings.run.seed, epoch, self.fabric.global_rank))
        noise = self._noise(epoch)
        if merging and not all(m.active for m in statistical_mergers(self.model)):
            self._statistics(start_statistics_)
        statistics_seconds = clock.lap()
        totals = self._train(epoch, merging)
        train_seconds = clock.lap()
        if merging and needs_statistics(self.model):
            self._refresh()
        average_running_statistics_(self.model, self.fabric)
        if self.average is not None:
            average_running_statistics_(self.average.model, self.fabric)
        statistics_seconds += clock.lap()
        with nullcontext() if merging or not is_merging(self.model) else self._without_merging():
            found = self.evaluate()
        row = self._row(epoch, merging, noise, totals, found)
        row = dataclasses.replace(
            row,
            train_seconds=train_seconds,
            statistics_seconds=statistics_seconds,
            val_seconds=clock.lap(),
            images_per_second=totals.num_images / train_seconds,
        )
        self.remark = f"last epoch: {bottleneck_text(row)}  tokens {row.tokens}".rstrip()
        return row

    def evaluate(self) -> Evaluation:
        """Evaluate the network that counts on the held-out images."""
        return evaluate(self.evaluated, self.loaders.val, self.loaders.num_classes, self.fabric)

    def _without_merging(self) -> Any:
        return merging_off(self.evaluated)

    def _noise(self, epoch: int) -> float:
        merge = self.settings.merge
        noise = annealed_noise(merge.noise, epoch, merge.warm_epochs, self.settings.optim.epochs)
        set_noise_(self.model, noise)
        return noise

    def _statistics(self, collect: Callable[[nn.Module, Iterable[Batch]], None]) -> None:
        with self.fabric.autocast():
            collect(self.model, self.loaders.clean())
        if self.average is not None:
            self.average.follow_statistics(self.model)

    def _refresh(self) -> None:
        """Q(t) and centroids(t), from the epoch's own batches or from clean images after it."""
        if not self.settings.statistics_from_epoch:
            self._statistics(refresh_statistics_)
            return
        take_statistics_(self.model)
        if self.average is not None:
            self.average.follow_statistics(self.model)

    def _train(self, epoch: int, merging: bool) -> Totals:
        train_mode_(self.model)
        forget_sums_(self.model)
        loader, totals = self.loaders.train, Totals(self.fabric.device)
        loader.set_epoch(epoch)
        watch = merging and self.settings.statistics_from_epoch and needs_statistics(self.model)
        paused = is_merging(self.model) and not merging
        title = f"epoch {epoch + 1}/{self.settings.optim.epochs}"
        with (
            merging_off(self.model) if paused else nullcontext(),
            bar(self.console, title, len(loader), shown=self.fabric.is_global_zero) as shown,
        ):
            self._batches = Lookahead(loader)
            for step, (images, labels) in enumerate(self._batches):
                losses = self._step(epoch, step, images, labels, merging=merging, watch=watch)
                if watch:
                    observe_(losses.records, labels)
                totals.add(losses, labels)
                self._show(shown, totals, len(images), step)
        return totals.over_processes(self.fabric)

    def _step(
        self, epoch: int, step: int, images: Tensor, labels: Tensor, *, merging: bool, watch: bool
    ) -> Losses:
        targets = labels
        if self.mixup is not None:
            images, targets = self.mixup(images, labels, epoch=epoch, step=step)
        accumulate, num_batches = self.settings.optim.accumulate, len(self.loaders.train)
        first = step - step % accumulate
        num_together = min(accumulate, num_batches - first)
        last = step + 1 == first + num_together
        with self.fabric.no_backward_sync(self.forward, enabled=not last):
            losses = self.objective(self.forward, images, targets, merging=merging, watch=watch)
            self.fabric.backward(losses.total / num_together)
        if last:
            self._update(losses.total, images, f"epoch {epoch + 1}, step {step + 1}")
        return losses

    def _update(self, loss: Tensor, images: Tensor, when: str) -> None:
        self.lr.set(self.updates)
        norm = self.fabric.clip_gradients(
            self.forward,
            self.optimizer,
            max_norm=self.settings.optim.clip or torch.inf,
            error_if_nonfinite=False,
        )
        self._batches.fetch()  # before anything waits for the device
        if not self._is_finite(loss, norm):
            self._stop(images, when)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.average is not None:
            self.average.update(self.model, self.updates)

    def _is_finite(self, loss: Tensor, norm: Any) -> bool:
        """Whether all processes may update; the norm of the gradient is one for all of them."""
        if self.settings.run.precision == "16":
            # Gradients may overflow: the scaler then leaves an update out.
            return bool(total_over_processes(loss.detach(), self.fabric).isfinite())
        return bool((norm.full_tensor() if isinstance(norm, DTensor) else norm).isfinite())

    def _stop(self, images: Tensor, when: str) -> None:
        """Stop before any weight moves, and say where it comes from. All processes come here."""
        if self.fabric.world_size > 1:
            self.model.eval()  # In training, layers may wait for other processes.
        with self.fabric.autocast():
            place = find_non_finite(self.model, images)
        raise NonFiniteLossError(
            f"the loss or its gradient is not finite in {when}: {place}; "
            "try a smaller lr, clip=1, or precision=32"
        )

    def _show(self, shown: Bar, totals: Totals, num_images: int, step: int) -> None:
        looks = step == 0 or (step + 1) % SHOW_EVERY == 0
        shown.step(num_images, f"{totals.text()}  {self.remark}" if looks else None)

    def _row(
        self, epoch: int, merging: bool, noise: float, totals: Totals, found: Evaluation
    ) -> EpochRow:
        share, tokens = None, ""
        if merging:
            done = report(self.model)
            share = done.share if totals.share is None else totals.share
            tokens = " ".join(_count(site) for site in done.sites if site.merges)
        return EpochRow(
            epoch=epoch + 1,
            merging=merging,
            lr=self.optimizer.param_groups[0]["lr"],
            noise=noise if merging else 0.0,
            train_loss=totals.mean_loss,
            train_top1=None if self.mixup is not None else totals.top1,
            val_loss=found.loss,
            val_top1=found.top1,
            ib_loss=found.ib_loss,
            ib_bound=found.ib_bound,
            mac_share=share,
            tokens=tokens,
        )


def _count(site: Site) -> str:
    return f"{site.grid_out[0]}x{site.grid_out[1]}" if site.grid_out else str(site.num_out)
