"""A training process that tests start: `python process.py SETTINGS OUTPUT [--die EPOCH STEP]`."""

import os
import signal
import sys
from pathlib import Path

import torch

from ltm.training.run import train
from ltm.training.settings import TrainSettings, read_settings
from ltm.training.trainer import Trainer


def die_at(epoch: int, step: int) -> None:
    """Have the process killed in the middle of an epoch, as by the system."""
    update = Trainer._update

    def deadly(self: Trainer, *args: object) -> None:
        if self.updates == epoch * self.updates_per_epoch + step:
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, *args)  # type: ignore[arg-type]

    Trainer._update = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings, output, *rest = sys.argv[1:]
    if rest:
        die_at(int(rest[1]), int(rest[2]))
    train(settings=read_settings(Path(settings), TrainSettings()), output=output)
