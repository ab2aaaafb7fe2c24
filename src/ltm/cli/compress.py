"""`ltm compress`: from a trained network and labelled images to a smaller one, with a report."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltm.files import check_folder

if TYPE_CHECKING:
    from torch import nn

    from ltm.report.comparison import Comparison
    from ltm.report.pictures import NamedPicture

INTERRUPTED = 130
"""What a shell sees of a command that Ctrl-C stopped."""


def compress(
    *,
    data: str,
    model: str | None = None,
    pretrained: bool = False,
    weights: Path | None = None,
    run: Path | None = None,
    method: str = "ltm",
    ratio: float = 0.7,
    compare: tuple[str, ...] = (),
    calibrate: bool = True,
    calibration_images: int = 256,
    calibration_trials: int = 100,
    finetune_epochs: int = 0,
    time: bool = True,
    time_batches: tuple[int, ...] = (1, 8),
    bottleneck_images: int = 1000,
    pictures: str = "data",
    split: str = "val",
    images: int | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    batch_size: int = 64,
    workers: int = 2,
    device: str = "auto",
    seed: int = 0,
    output: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Make a trained network smaller and faster, and report what that gained and lost.

    Converts the network, chooses where to merge on unlabelled images, fine-tunes if asked to,
    freezes and saves it with a model card; evaluates it against the original and the methods in
    --compare on the same labelled images, times them, and writes report.html and metrics.json.
    Ctrl-C stops, and keeps what is done.

    Example:
        ltm compress --model vit_small_patch16_224 --pretrained --data imagenet/val --ratio 0.7
            --compare tome,tofu --output runs/small

    Args:
        data: folder or .zip of class folders, tar shards, hf:NAME, or shapes (generated).
        model: timm's name of the network.
        pretrained: take timm's own weights.
        weights: take those of a file in timm's keys, .safetensors or .pth.
        run: start from a saved network instead.
        method: how to merge, such as ltm or ltm:support=learned,sites=3+5+8.
        ratio: share of the multiply-adds that may remain.
        compare: other methods to measure beside it, such as tome,tofu,ltmp.
        calibrate: choose the schedule on unlabelled images, where the network and the data allow.
        calibration_images: how many; none of them is evaluated. 0 sets none aside.
        calibration_trials: schedules to try; Ctrl-C keeps the best so far.
        finetune_epochs: train the mask modules on the training split for so many epochs.
        time: measure latency.
        time_batches: batch sizes to time.
        bottleneck_images: at most so many for the information bottleneck; 0 leaves it out.
        pictures: what the report shows: data, generated, or an image or folder of them.
        split: split of the data to evaluate on, where it has several.
        images: evaluate this many images instead of all.
        num_classes: by default what the weights have.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        batch_size: images per batch.
        workers: loader processes.
        device: auto, cpu, cuda or cuda:N.
        seed: of calibration and fine-tuning.
        output: folder for the model and the report; by default below runs/.
        overwrite: replace another run's results there.
    """
    command = command_line("compress", compress, locals())
    name = model or (run.name if run is not None else "model")
    output = (
        output or Path("runs") / f"{name.replace('/', '-')}-{method.partition(':')[0]}-{ratio:g}"
    )
    check_folder(output, overwrite=overwrite, written=("README.md",))

    import torch

    from ltm.cli.compression import Compression, Options
    from ltm.cli.tuning import require_training_images
    from ltm.evaluation.images import part_images
    from ltm.models import ModelSource, check_classes, method_config, require_least, split_methods
    from ltm.processes import local_device

    where = local_device(device)
    config = method_config(method, ratio)
    peers = tuple(text for text in split_methods(compare) if text != method)
    for text in peers:
        method_config(text, ratio)
    require_least("bottleneck-images", bottleneck_images, 0)
    parts = part_images(data, split=split, images=images, calibration_images=calibration_images)
    if finetune_epochs:
        require_training_images(parts, data)
    shown = open_pictures(pictures)
    torch.manual_seed(seed)
    loaded = ModelSource(
        model=model,
        pretrained=pretrained,
        weights=weights,
        run=run,
        num_classes=num_classes,
        image_size=image_size,
        model_args=model_args,
    ).load(merges=True)
    host = original_of(loaded)
    check_classes(host, parts.evaluation.class_names, data)
    job = Compression(
        host,
        parts,
        Options(
            model=name,
            weights=_origin_of_weights(pretrained, weights, run),
            method=method,
            config=config,
            data=data,
            output=output,
            command=command,
            device=where,
            compare=peers,
            calibrate=calibrate,
            calibration_trials=calibration_trials,
            finetune_epochs=finetune_epochs,
            time_batches=time_batches if time else (),
            bottleneck_images=bottleneck_images,
            batch_size=batch_size,
            workers=workers,
            seed=seed,
            pictures=shown,
            model_args=_named(model_args),
            origin=_origin(host) if pretrained else {},
        ),
        say,
    )
    job.run()
    comparison = job.write()
    show(comparison)
    say(f"Report: {output / 'report.html'}")
    if comparison.interrupted:
        say(f"Stopped during {comparison.interrupted}; {output} holds what was done until then.")
        sys.exit(INTERRUPTED)


def say(line: str) -> None:
    """Tell the user how far it is; one plain line."""
    print(line, flush=True)


def original_of(model: nn.Module) -> nn.Module:
    """The network without any merging, whatever it was loaded from."""
    from ltm.api import is_merging, unmerge_tokens_

    if is_merging(model):
        unmerge_tokens_(model)
    return model


def open_pictures(pictures: str) -> tuple[NamedPicture, ...] | None:
    """The pictures that the report shows; None takes them from the data."""
    from ltm.report.pictures import NUM_PICTURES, generated_pictures, read_pictures

    if pictures == "data":
        return None
    if pictures == "generated":
        return tuple(generated_pictures())
    return tuple(read_pictures([Path(pictures)], NUM_PICTURES))


def command_line(name: str, command: Callable[..., object], values: Mapping[str, Any]) -> str:
    """The call that repeats a run: every option that differs from its default."""
    words = ["ltm", name]
    for option, parameter in inspect.signature(command).parameters.items():
        value = values[option]
        if value == parameter.default or option == "overwrite":
            continue
        flag = f"--{option.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def show(comparison: Comparison) -> None:
    """Print the table and what it says."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from ltm.report.documents import table_of
    from ltm.report.verdicts import verdicts

    # A file or a pipe has no width: tables there are as wide as they need.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    header, *rows = table_of(comparison)
    console.print(comparison.title, markup=False, highlight=False)
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for index, column in enumerate(header):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for sentence in verdicts(comparison):
        console.print(f"- {sentence}", markup=False, highlight=False)


def _origin_of_weights(pretrained: bool, weights: Path | None, run: Path | None) -> str:
    if run is not None:
        return f"the saved network {run.name}"
    return "timm's own" if pretrained else str(weights and weights.name)


def _origin(model: nn.Module) -> dict[str, str]:
    """What timm knows about where weights come from."""
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    found = {"base_model": known.get("hf_hub_id"), "license": known.get("license")}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _named(words: tuple[str, ...]) -> dict[str, Any]:
    from ltm.models import read_words

    return read_words(words, owner="model_args")
