"""One picture through a network, before and after merging: everything that the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltm.adapters.base import Layout
from ltm.api import conversion_of
from ltm.core.cost import meta_copy, meta_images, run_on_meta
from ltm.core.schedule import Grid, grid_counts, halve
from ltm.deployment.predictor import likeliest
from ltm.evaluation.latency import interleaved, speedup, spread, verdict
from ltm.report.pictures import Pixels, prepare
from ltm.report.tracing import SiteMap, at_block, trace
from ltm.web.networks import ShownNetwork

_TOP = 5


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A class and its probability."""

    name: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block: tokens that leave it and millions of MACs, before and after merging."""

    block: int
    tokens_before: int
    tokens_after: int
    mmacs_before: float
    mmacs_after: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds for this picture alone, on this machine."""

    before: float
    after: float
    verdict: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Inspection:
    """One picture, before and after merging."""

    pixels: Pixels
    """The picture as the network sees it."""
    before: tuple[Guess, ...]
    after: tuple[Guess, ...]
    layers: tuple[Layer, ...]
    tokens: tuple[SiteMap, ...]
    """The tokens as they leave each block, as weights over the patches of its stage."""
    mmacs_before: float
    mmacs_after: float
    timing: Timing | None = None


@torch.inference_mode()
def inspect(
    network: ShownNetwork, merging: nn.Module, picture: Image.Image, *, rounds: int = 7
) -> Inspection:
    """Run a picture through the original and the merging network; `rounds=0` times nothing."""
    scenes = prepare([picture], ["picture"], network.spec)
    images = scenes.inputs
    before, after = (_macs(model, network.spec.size) for model in (network.model, merging))
    tokens = _tokens(network.layout, trace(merging, images), merging)
    return Inspection(
        pixels=scenes.pixels[0],
        before=_guesses(network.model(images), network.class_names),
        after=_guesses(merging(images), network.class_names),
        layers=_layers(network, tokens, before, after),
        tokens=tokens,
        mmacs_before=before[""] / 1e6,
        mmacs_after=after[""] / 1e6,
        timing=_time(network.model, merging, images, rounds) if rounds else None,
    )


def _guesses(logits: Tensor, names: tuple[str, ...]) -> tuple[Guess, ...]:
    indices, values = (found.tolist() for found in likeliest(logits[0], _TOP))
    pairs = zip(indices, values, strict=True)
    return tuple(Guess(name=names[index], probability=value) for index, value in pairs)


_COUNTED: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


def _macs(model: nn.Module, size: tuple[int, int]) -> dict[str, int]:
    """MACs of every module by its path, counted once; "" is the whole."""
    if model not in _COUNTED:
        shadow = meta_copy(model)
        with FlopCounterMode(display=False) as counter:
            run_on_meta(shadow, meta_images(shadow, size))
        root = type(shadow).__name__
        found = {"": counter.get_total_flops() // 2}
        for path, operations in counter.get_flop_counts().items():
            if path.startswith(f"{root}."):
                found[path.removeprefix(f"{root}.")] = sum(operations.values()) // 2
        _COUNTED[model] = found
    return _COUNTED[model]


def _tokens(layout: Layout, sites: Sequence[SiteMap], merging: nn.Module) -> tuple[SiteMap, ...]:
    """The tokens that leave each block: those of the last merge that is in effect, or the patches.

    A merged sequence is in effect until its run of blocks ends, a merged grid until its stage ends.
    """
    maps = {site.block: site for site in sites}
    merged_grids = {site.block: site.grid_out for site in conversion_of(merging).sites}
    ends = {run.blocks[-1] for run in layout.runs}
    grid, shown, found = _entry(layout), None, []
    for index, block in enumerate(layout.blocks):
        if index and block.stage != layout.blocks[index - 1].stage:
            grid, shown = halve(grid), None
        shown = maps.get(index, shown)
        found.append(shown or at_block((), index, grid, 1))
        grid = merged_grids.get(index) or grid
        if index in ends and shown is not None and merged_grids.get(shown.block) is None:
            shown = None
    return tuple(found)


def _entry(layout: Layout) -> Grid:
    return layout.entry or layout.runs[0].grid


def _layers(
    network: ShownNetwork,
    left: Sequence[SiteMap],
    before: dict[str, int],
    after: dict[str, int],
) -> tuple[Layer, ...]:
    layout = network.layout
    grids = grid_counts([0.0] * len(layout.blocks), _entry(layout), layout.stage_sizes)
    return tuple(
        Layer(
            block=index,
            tokens_before=grids[index][0] * grids[index][1],
            tokens_after=left[index].num_tokens(0),
            mmacs_before=before.get(block.path, 0) / 1e6,
            mmacs_after=after.get(block.path, 0) / 1e6,
        )
        for index, block in enumerate(layout.blocks)
    )


def _time(original: nn.Module, merging: nn.Module, images: Tensor, rounds: int) -> Timing:
    calls = {"before": lambda: original(images), "after": lambda: merging(images)}
    times = interleaved(calls, torch.device("cpu"), rounds=rounds, warmup=1, least_seconds=0.01)
    return Timing(
        before=1e3 * spread(times["before"]).median,
        after=1e3 * spread(times["after"]).median,
        verdict=verdict(speedup(times["before"], times["after"])),
    )
