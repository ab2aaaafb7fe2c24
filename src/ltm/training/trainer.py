"""The training loop: Algorithm 1, epoch by epoch, for any `Task`.

An epoch depends on nothing but the state before it: order, augmentation, noise and dropout come
from the seed and the epoch's number. So a run that is stopped and resumed repeats itself exactly.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ltm.api import merging_network, merging_off
from ltm.core.validation import first_line
from ltm.data.loading import Lookahead
from ltm.data.sampling import make_key
from ltm.interruption import stepwise
from ltm.processes import sum_over_processes
from ltm.progress import progress_bar
from ltm.training.checkpoint import Checkpoint, Checkpoints
from ltm.training.fabric import Fabric, average_running_statistics_, first_alone
from ltm.training.non_finite import NonFiniteLossError, find_non_finite
from ltm.training.optimisation import (
    AveragedWeights,
    effective_lr,
    make_optimizer,
    make_schedule,
)
from ltm.training.settings import to_yaml
from ltm.training.task import BatchLoss, EpochRow, Means, Step, Task
from ltm.training.trainable import annealed_noise, set_noise_, train_mode_

_SHOW_EVERY = 20
"""Steps between new numbers beside the bar."""
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Trainer:
    """A network in training: what changes from epoch to epoch, and how."""

    def __init__(
        self, fabric: Fabric, task: Task, model: nn.Module, *, shows_progress: bool = False
    ) -> None:
        self.fabric, self.task, self.model = fabric, task, model
        self.shows_progress = shows_progress and fabric.is_global_zero
        self.settings = task.settings
        optim = self.settings.optim
        self.total_batch = self.settings.data.batch_size * fabric.world_size * optim.accumulate
        self.batches = task.start(fabric, model)
        self.forward = fabric.setup_module(model)
        optimizer = make_optimizer(model, optim, self.total_batch)
        self.optimizer: Any = fabric.setup_optimizers(optimizer)
        self.updates_per_epoch = -(-len(self.batches) // optim.accumulate)
        self.schedule = make_schedule(
            optimizer, optim, self.updates_per_epoch, effective_lr(optim, self.total_batch)
        )
        self.average = None
        if optim.ema:
            self.average = AveragedWeights(model, decay=optim.ema, use_warmup=True)
        self.updates = 0
        self._ahead: Lookahead[Any] = Lookahead(())
        self._remark = ""

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate and keep: the one with averaged weights, if there is one."""
        return self.model if self.average is None else self.average.module

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are spread over the processes."""
        return self.settings.run.strategy == "fsdp"

    def merges_in(self, epoch: int) -> bool:
        """Whether tokens are merged in an epoch, counted from 0."""
        merges = merging_network(self.model) is not None
        return merges and epoch >= self.settings.merge.warm_epochs

    def run_epoch(self, epoch: int) -> EpochRow:
        """Train for one epoch (from 0), refresh the class statistics, evaluate."""
        merging, clock = self.merges_in(epoch), _Clock(self.fabric.device)
        torch.manual_seed(make_key(self.settings.run.seed, epoch, self.fabric.global_rank))
        noise = self._noise(epoch) if merging else 0.0
        if merging and self.task.before_epoch_(self.model):
            self._follow()
        statistics_seconds = clock.lap()
        means = self._train(epoch, merging)
        train_seconds = clock.lap()
        if merging and self.task.after_epoch_(self.model):
            self._follow()
        average_running_statistics_(self.model, self.fabric)
        if self.average is not None:
            average_running_statistics_(self.average.module, self.fabric)
        statistics_seconds += clock.lap()
        found = self.evaluate(merging=merging) if self.task.is_evaluated(epoch) else None
        common = {
            "epoch": epoch + 1,
            "merging": merging,
            "lr": self.optimizer.param_groups[0]["lr"],
            "noise": noise,
            "train_seconds": train_seconds,
            "statistics_seconds": statistics_seconds,
            "val_seconds": clock.lap(),
            "images_per_second": means.num_images / train_seconds,
        }
        row = self.task.row(common, means, self.model, found)
        self._remark = row.remark
        return row

    def evaluate(self, *, merging: bool = True) -> Any:
        """Evaluate the network to keep on the held-out images."""
        with self._merging(self.evaluated, merging):
            return self.task.evaluate(self.evaluated)

    def save(
        self,
        checkpoints: Checkpoints,
        epoch: int,
        score: float | None,
        history: list[dict[str, Any]],
    ) -> None:
        """Write a checkpoint after an epoch, in the first process; the others wait."""
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        if self.is_sharded:
            weights: Any = get_model_state_dict(self.model, options=_WHOLE)
            updates: Any = get_optimizer_state_dict(self.model, optimizer, options=_WHOLE)
        else:
            weights, updates = self.model.state_dict(), optimizer.state_dict()
        tensors = {"weights": weights}
        if self.average is not None:
            tensors["ema"] = self.average.module.state_dict()
        state = {
            "optimizer": updates,
            "total_batch": self.total_batch,
            "precision": self.fabric.strategy.precision.state_dict(),
        }
        with first_alone(self.fabric) as first:
            if first:
                checkpoints.save(
                    epoch=epoch,
                    tensors=tensors,
                    state=state,
                    score=score,
                    history=history,
                    settings=to_yaml(self.settings),
                )

    def restore_(self, checkpoint: Checkpoint) -> str:
        """Load the state of a checkpoint; returns a sentence about what differs from that run.

        A checkpoint that does not fit is a ValueError.
        """
        try:
            return self._restore_(checkpoint, checkpoint.state())
        except (RuntimeError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            if str(checkpoint.folder) in str(error):
                raise
            raise ValueError(
                f"checkpoint {checkpoint.folder} does not fit this run ({first_line(error)}); "
                "delete it to go on from the one before"
            ) from error

    def _restore_(self, checkpoint: Checkpoint, state: dict[str, Any]) -> str:
        weights: dict[str, Any] = dict(checkpoint.weights())
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        if self.is_sharded:
            set_model_state_dict(self.model, weights, options=_WHOLE)
            set_optimizer_state_dict(self.model, optimizer, state["optimizer"], options=_WHOLE)
        else:
            self.model.load_state_dict(weights)
            optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.module.load_state_dict(checkpoint.weights("ema"))
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        # A checkpoint is the end of an epoch. The learning rate follows the images seen: another
        # number of processes makes more or fewer updates in an epoch.
        self.updates = checkpoint.epoch * self.updates_per_epoch
        before = state.get("total_batch", self.total_batch)  # 0.1.0 does not say
        if before == self.total_batch:
            return ""
        return (
            f"the total batch is {self.total_batch} and was {before}; the learning rate follows "
            "the images seen, and its peak is "
            f"{effective_lr(self.settings.optim, self.total_batch):g}"
        )

    def _merging(self, model: nn.Module, merging: bool) -> AbstractContextManager[Any]:
        network = merging_network(model)
        return nullcontext() if merging or network is None else merging_off(network)

    def _noise(self, epoch: int) -> float:
        merge = self.settings.merge
        noise = annealed_noise(merge.noise, epoch, merge.warm_epochs, self.settings.optim.epochs)
        set_noise_(self.model, noise)
        return noise

    def _follow(self) -> None:
        if self.average is not None:
            self.average.follow_statistics(self.model)

    def _train(self, epoch: int, merging: bool) -> Means:
        train_mode_(self.model)
        epochs, means, start = self.settings.optim.epochs, Means(), time.perf_counter()
        self.batches.set_epoch(epoch)
        with (
            self._merging(self.model, merging),
            progress_bar(
                f"epoch {epoch + 1}/{epochs}",
                len(self.batches),
                silent=not self.shows_progress,
                transient=True,
            ) as advance,
        ):
            self._ahead = Lookahead(self.batches)
            for number, batch in enumerate(stepwise(self._ahead)):
                means.add(self._step(batch, Step(epoch, number, merging)))
                looks = number == 0 or (number + 1) % _SHOW_EVERY == 0
                advance(self._text(means, start) if looks else "")
        return means.over_processes(self.fabric.world_size)

    def _text(self, means: Means, start: float) -> str:
        speed = f"{means.num_images / (time.perf_counter() - start):.0f} images/s"
        parts = (speed, self.task.progress_text(means), self._remark)
        return "  ".join(part for part in parts if part)

    def _step(self, batch: Any, step: Step) -> BatchLoss:
        accumulate = self.settings.optim.accumulate
        first = step.number - step.number % accumulate
        num_together = min(accumulate, len(self.batches) - first)
        last = step.number + 1 == first + num_together
        with self.fabric.no_backward_sync(self.forward, enabled=not last):
            loss = self.task.loss(self.forward, batch, step)
            self.fabric.backward(loss.total / num_together)
        if last:
            self._update(loss, step)
        return loss

    def _update(self, loss: BatchLoss, step: Step) -> None:
        self.schedule.step_update(self.updates)
        norm = self.fabric.clip_gradients(
            self.forward,
            self.optimizer,
            max_norm=self.settings.optim.clip or torch.inf,
            error_if_nonfinite=False,
        )
        self._ahead.fetch()  # before anything waits for the device
        if not self._is_finite(loss.total, norm):
            self._stop(loss, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.average is not None:
            self.average.update(self.model, self.updates)

    def _is_finite(self, loss: Tensor, norm: Any) -> bool:
        """Whether to update; the answer is the same in all processes, as the norm is."""
        if self.settings.run.precision == "16":
            # Gradients may overflow: the scaler then skips the update.
            return bool(sum_over_processes(loss.detach()).isfinite())
        return bool((norm.full_tensor() if isinstance(norm, DTensor) else norm).isfinite())

    def _stop(self, loss: BatchLoss, step: Step) -> None:
        """Stop before the update, and name the module. All processes come here."""
        if self.fabric.world_size > 1:
            self.model.eval()  # in training mode, layers may wait for other processes
        with self.fabric.autocast():
            place = find_non_finite(self.model, *loss.inputs)
        raise NonFiniteLossError(
            f"the loss or its gradient is not finite in epoch {step.epoch + 1}, step "
            f"{step.number + 1}: {place}; try a smaller lr, clip=1, or precision=32"
        )


class _Clock:
    """Seconds between laps, work on the device included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        before, self._start = self._start, time.perf_counter()
        return self._start - before
