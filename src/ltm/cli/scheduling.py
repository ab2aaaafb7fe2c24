"""Choosing a schedule on unlabelled images, within another command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ltm.evaluation.images import Partition

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ltm.calibration import CalibrateResult
    from ltm.methods import MethodConfig


def why_not_calibrated(model: nn.Module, images: Partition) -> str:
    """What keeps a converted model's schedule from being chosen on images; empty for nothing."""
    from ltm.api import conversion_of

    done = conversion_of(model)
    if done.family != "vit":
        return f"calibration is for ViTs, and this is {done.config.title} on {done.family}"
    reason = done.config.unschedulable(grid=False)
    if reason:
        return reason
    if done.config.ratio in (None, 1) or done.config.sites is not None:
        return "it was given"
    if images.calibration is None:
        return f"there are no images to calibrate on, as {images.reason}"
    return ""


def choose_schedule(
    model: nn.Module, images: Tensor, config: MethodConfig, *, trials: int, seed: int
) -> CalibrateResult:
    """The schedule that stays closest to the original; Ctrl-C keeps the best so far."""
    from ltm.calibration import CalibrateSettings, calibrate

    assert config.ratio is not None
    with counting("calibration") as step:
        return calibrate(
            model,
            images,
            budget=config.ratio,
            config=config,
            settings=CalibrateSettings(trials=trials, seed=seed),
            progress=lambda _: step(),
        )


@contextmanager
def counting(description: str) -> Iterator[Callable[[], None]]:
    """Show how many steps are done, on a terminal; how many there will be is not known."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed} trials"))
    hidden = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=hidden) as bar:
        task = bar.add_task(description, total=None)
        yield lambda: bar.advance(task)
