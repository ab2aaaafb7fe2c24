"""A trainer's state to and from checkpoints, on one process or many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ltm.training.checkpoint import Checkpoint, Checkpoints
from ltm.training.fabric import first_alone
from ltm.training.trainer import Trainer

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_state(
    trainer: Trainer,
    checkpoints: Checkpoints,
    epoch: int,
    score: float | None,
    history: list[dict[str, Any]],
) -> None:
    """Write a checkpoint after an epoch; the first process does, the others wait."""
    tensors = {"weights": _weights(trainer)}
    if trainer.average is not None:
        tensors["ema"] = trainer.average.model.state_dict()
    state = {
        "optimizer": _optimizer(trainer),
        "updates": trainer.updates,
        "precision": trainer.fabric.strategy.precision.state_dict(),
    }
    with first_alone(trainer.fabric) as first:
        if first:
            checkpoints.save(
                epoch=epoch, tensors=tensors, state=state, score=score, history=history
            )


def restore_(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a trainer where the checkpoint was written."""
    state: dict[str, Any] = checkpoint.state()
    weights: dict[str, Any] = dict(checkpoint.weights())
    if sharded(trainer):
        set_model_state_dict(trainer.model, weights, options=_WHOLE)
        set_optimizer_state_dict(
            trainer.model, trainer.optimizer.optimizer, state["optimizer"], options=_WHOLE
        )
    else:
        trainer.model.load_state_dict(weights)
        trainer.optimizer.optimizer.load_state_dict(state["optimizer"])
    if trainer.average is not None:
        trainer.average.model.load_state_dict(checkpoint.weights("ema"))
    trainer.fabric.strategy.precision.load_state_dict(state["precision"])
    trainer.updates = int(state["updates"])


def sharded(trainer: Trainer) -> bool:
    """Whether parameters are spread over the processes."""
    return trainer.settings.run.strategy == "fsdp"


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    if sharded(trainer):
        return get_model_state_dict(trainer.model, options=_WHOLE)  # type: ignore[return-value]
    return trainer.model.state_dict()


def _optimizer(trainer: Trainer) -> dict[str, Any]:
    optimizer: torch.optim.Optimizer = trainer.optimizer.optimizer
    if sharded(trainer):
        return get_optimizer_state_dict(trainer.model, optimizer, options=_WHOLE)
    return optimizer.state_dict()
