"""`ltm calibrate`: where a network merges, how much and how, chosen on unlabelled images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltm.evaluation.images import load_batches, open_images
from ltm.files import check_folder, write_metrics
from ltm.models import ModelSource, require_least
from ltm.progress import interruptible

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ltm.calibration import Trial

INTERRUPTED = 130
"""What a shell sees of a command that Ctrl-C stopped."""


def calibrate(
    *,
    data: str,
    model: str | None = None,
    pretrained: bool = False,
    weights: Path | None = None,
    run: Path | None = None,
    budget: float | None = None,
    budget_ms: float | None = None,
    images: int = 256,
    split: str = "val",
    sites: int = 4,
    multiple: int | None = None,
    trials: int = 150,
    time_batch: int = 1,
    time_mode: str | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    batch_size: int | None = None,
    workers: int = 2,
    device: str = "auto",
    seed: int = 0,
    output: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Choose where a network merges, how much and how, on unlabelled images within a budget.

    Tries schedules and keeps the one whose outputs stay closest to the original network's: which
    blocks merge, how many tokens they leave, whether tokens are merged or dropped, and whether
    those that get much attention are protected. Ctrl-C stops, and keeps the best so far. The folder
    --output then holds the network as `--run` takes it (config.json, model.safetensors), and
    metrics.json.

    Example:
        ltm calibrate --model vit_small_patch16_224 --pretrained --data imagenet/train
            --budget 0.7 --output runs/calibrated

    Args:
        data: folder or .zip of class folders, tar shards, hf:NAME, or shapes (generated).
        model: timm's name of the network.
        pretrained: take timm's own weights.
        weights: take those of a file in timm's keys, .safetensors or .pth.
        run: calibrate a saved network anew.
        budget: share of the multiply-adds that may remain.
        budget_ms: instead, milliseconds that a batch may take on this device.
        images: how many images to look at; a few hundred do. Labels are not used.
        split: split of the data, where it has several.
        sites: at most so many blocks merge.
        multiple: token counts, prefix included, are a multiple of this; by default 8, or 1 where
            there are few tokens.
        trials: schedules to try once it is known what each block minds.
        time_batch: images in the batch that --budget-ms is about.
        time_mode: how it runs: eager, compiled or cudagraph.
        num_classes: by default what the weights have.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        batch_size: images at a time; by default 64 on a CPU, 256 on a GPU.
        workers: loader processes.
        device: auto, cpu, cuda or cuda:N.
        seed: of the search.
        output: folder for the network and metrics.json.
        overwrite: replace another run's results there.
    """
    check_folder(output, overwrite=overwrite)

    from ltm import calibration
    from ltm.calibration.settings import MIN_IMAGES, check_budget
    from ltm.processes import local_device

    if (budget is None) == (budget_ms is None):
        raise ValueError("budget: give --budget or --budget-ms, one of them")
    if budget is not None:
        check_budget(budget)
    require_least("images", images, MIN_IMAGES)
    settings = calibration.Settings(
        num_sites=sites,
        multiple=multiple,
        num_trials=trials,
        batch_size=batch_size,
        time_batch=time_batch,
        time_mode=time_mode,
        seed=seed,
    )
    where = local_device(device)
    loaded = ModelSource(
        model=model,
        pretrained=pretrained,
        weights=weights,
        run=run,
        num_classes=num_classes,
        image_size=image_size,
        model_args=model_args,
    ).load(merges=True)
    pictures = read_images(loaded, data, split, images, workers)
    size = (pictures.shape[-2], pictures.shape[-1])
    with showing(trials) as note:
        result = calibration.calibrate(
            loaded.to(where),
            pictures,
            budget=budget,
            budget_ms=budget_ms,
            image_size=size,
            settings=settings,
            progress=note,
        )
    print(result)
    save(loaded, result, size, output)
    write_metrics(output, describe(result, data=data, model=model or str(run), device=where))
    if result.interrupted:
        kept = "" if output is None else f"; {output} holds it"
        print(f"Stopped early: this is the best of {len(result.history)} trials{kept}.")
        sys.exit(INTERRUPTED)


def read_images(model: nn.Module, data: str, split: str, number: int, workers: int) -> Tensor:
    """So many images, spread over the data, as the model expects them."""
    import torch

    dataset = open_images(data, split, number)
    batches = load_batches(dataset, data, model, batch_size=64, workers=workers, labelled=False)
    return torch.cat([batch[0] for batch in batches])


def save(model: nn.Module, result: Any, size: tuple[int, int], output: Path | None) -> None:
    """Write the network that merges as found, for `--run`."""
    from ltm.api import is_merging, merge_tokens_, save as save_model, unmerge_tokens_

    if output is None:
        return
    if is_merging(model):
        print("What its mask modules had learned belongs to other sites, and is not kept.")
        unmerge_tokens_(model)
    merge_tokens_(model, result.config, size)
    save_model(model.cpu(), output)


def describe(result: Any, **about: object) -> dict[str, Any]:
    """Everything there is to know about a calibration, as plain values."""
    import dataclasses

    from ltm.evaluation import environment
    from ltm.evaluation.accuracy import as_row

    device: Any = about.pop("device")
    return {
        **about,
        **result.to_dict(),
        "environment": as_row(environment.describe(device)),
        "history": [dataclasses.asdict(trial) for trial in result.history],
    }


@contextmanager
def showing(num_trials: int) -> Iterator[Callable[[Trial], None]]:
    """Show how a search goes, on a terminal; Ctrl-C ends it after the trial at hand."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    refined = 0
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        interruptible() as interrupted,
    ):
        task = bar.add_task("what each block minds", total=None)

        def note(trial: Trial) -> None:
            nonlocal refined
            refined += trial.phase == "refinement"
            if trial.is_best:
                found = f"divergence {trial.divergence:.4f} at {trial.share:.3f}"
                bar.update(task, description=found)
            if trial.phase != "sensitivity":
                bar.update(task, completed=refined, total=num_trials)
            if interrupted.is_set():
                raise KeyboardInterrupt

        yield note
