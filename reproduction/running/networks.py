"""Networks of jobs: made, loaded, kept; and the images they are measured on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from ltm.api import conversion_of, gmacs, image_size_of, load, merge_tokens_
from ltm.core.schedule import ceil_count, ceil_grid, halve
from ltm.data.config import DataConfig
from ltm.data.datasets import Splits, open_splits
from ltm.data.images import ImageDataset, ImageFiles
from ltm.data.loading import Loader, evaluation_loader
from ltm.data.transforms import image_spec
from ltm.methods import LTM
from ltm.training.network import (
    build,
    convert_,
    load_weights_,
    make_timm_model,
    method_config,
    save_model,
    spec_of,
)
from ltm.training.settings import MergeSettings, TrainSettings
from reproduction.jobs import Classifier, Job, Pruned
from reproduction.running.context import Context


def local_settings(job: Classifier | Pruned, context: Context) -> TrainSettings:
    """The settings of a job on this machine, starting from the network that it needs."""
    settings = job.settings
    kind: Any = context.device.type
    settings = replace(
        settings,
        data=replace(settings.data, workers=context.workers),
        run=replace(settings.run, device=kind, devices=context.devices),
    )
    if job.start is not None:
        folder = str(context.store.network_folder(job.start))
        settings = replace(settings, model=replace(settings.model, weights=folder))
    if isinstance(job, Classifier) and job.layer is not None:
        settings = _with_layer(settings, *job.layer)
    if isinstance(job, Classifier) and job.sites_of is not None:
        settings = _with_sites(settings, job.sites_of)
    return settings


def _with_sites(settings: TrainSettings, other: MergeSettings) -> TrainSettings:
    """The blocks and the numbers of tokens that another method has."""
    host = _untouched(settings)
    convert_(host, settings, method_config(other))
    sites = [site for site in conversion_of(host).sites if site.merges]
    options = (
        f"sites={[site.block for site in sites]}",
        f"counts={[site.num_out for site in sites]}",
    )
    merge = replace(settings.merge, ratio=None, per_block=None)
    merge = replace(merge, method_options=(*merge.method_options, *options))
    return replace(settings, merge=merge)


def _untouched(settings: TrainSettings) -> nn.Module:
    """The network before anything is loaded or converted."""
    return make_timm_model(
        replace(settings, model=replace(settings.model, weights=None, pretrained=False)), 2
    )


def _with_layer(settings: TrainSettings, index: int, rate: float) -> TrainSettings:
    """Explicit counts in which one site keeps another share of its tokens."""
    assert settings.merge.per_block is not None, "the other layers' share is per_block"
    host = _untouched(settings)
    counts = layer_counts(
        host, image_spec(settings.data, host).size, settings.merge.per_block, index, rate
    )
    option = f"counts={[list(c) if isinstance(c, tuple) else c for c in counts]}"
    options = (*settings.merge.method_options, option)
    return replace(settings, merge=replace(settings.merge, method_options=options))


def layer_counts(
    model: nn.Module, size: tuple[int, int], share: float, index: int, rate: float
) -> list[int | tuple[int, int]]:
    """Tokens after each site where all keep `share` of their tokens, but site `index` `rate`."""
    merge_tokens_(model, LTM(per_block=share), size)
    counts: list[int | tuple[int, int]] = []
    sites = conversion_of(model).sites
    grid, left, stage = sites[0].grid_in, sites[0].num_in, sites[0].grid
    if not 0 <= index < len(sites):
        raise ValueError(f"layer is {index}: this network has sites 0 to {len(sites) - 1}")
    for number, site in enumerate(sites):
        kept = rate if number == index else share
        if grid is None:
            left = ceil_count(left, kept)
            counts.append(left)
            continue
        grid, stage = halve(grid) if site.grid != stage else grid, site.grid
        grid = ceil_grid(grid, kept)
        counts.append(grid)
    return counts


def splits_of(settings: TrainSettings) -> Splits:
    """The images of a job. Jobs share them, so that what is kept of them is made once."""
    data = settings.data
    return _opened(
        DataConfig(
            source=data.source,
            train_split=data.train_split,
            val_split=data.val_split,
            holdout_ratio=data.holdout_ratio,
            max_unreadable=data.max_unreadable,
        )
    )


@lru_cache(maxsize=4)
def _opened(data: DataConfig) -> Splits:
    splits = open_splits(data)
    for images in (splits.train, splits.val):
        if isinstance(images, ImageDataset):
            images.files = _Remembered(images.files)
    return splits


class _Remembered:
    """Images that are read once, as long as they fit: decoding takes longer than cropping."""

    def __init__(self, files: ImageFiles, num_bytes: int = 1 << 29) -> None:
        self._files, self._left = files, num_bytes
        self._images: dict[int, Image.Image] = {}

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return self._files.name(index)

    def read(self, index: int) -> Image.Image:
        image = self._images.get(index)
        if image is None:
            image = self._files.read(index)
            size = 3 * image.width * image.height
            if size <= self._left:
                self._images[index], self._left = image, self._left - size
        return image


def evaluation_images(settings: TrainSettings) -> ImageDataset:
    """The held-out images of a job."""
    return splits_of(settings).val


def held_out(settings: TrainSettings, model: nn.Module, context: Context) -> Loader:
    """Batches of the held-out images, in order."""
    spec = spec_of(settings, model)
    data = replace(settings.data, workers=context.workers)
    return evaluation_loader(evaluation_images(settings), spec, data, device=context.device)


def some_images(settings: TrainSettings, model: nn.Module, number: int) -> torch.Tensor:
    """A few held-out images, spread over all, repeated where there are fewer."""
    few = evaluation_images(settings).take(number)
    data = replace(settings.data, batch_size=number, workers=0)
    batch = next(iter(evaluation_loader(few, spec_of(settings, model), data))).images
    return batch[torch.arange(number) % len(batch)]


def keep_network(model: nn.Module, folder: Path) -> None:
    """Write a network into a folder that is there only when it is whole."""
    beside = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    save_model(model, beside)
    beside.replace(folder)


def saved_network(job: Job, context: Context) -> nn.Module:
    """The network that a job left, in evaluation mode, on the device."""
    assert isinstance(job, Classifier)
    settings = local_settings(job, context)
    num_classes = evaluation_images(settings).num_classes
    folder = context.store.network_folder(job)
    untouched = replace(settings.model, weights=None, pretrained=False)
    host = make_timm_model(replace(settings, model=untouched), num_classes)
    if job.settings.merge.method == "none":
        load_weights_(host, folder)
        model = host
    else:
        model = load(folder, host)
    return model.to(context.device).eval()


def fresh_network(settings: TrainSettings, num_classes: int) -> nn.Module:
    """The network that training starts from, converted."""
    torch.manual_seed(settings.run.seed)
    return build(settings, num_classes).model


def macs_of(model: nn.Module, size: tuple[int, int] | None = None) -> int:
    """Multiply-adds of one image."""
    return round(1e9 * gmacs(model, image_size_of(model, size)))
