"""From a config to sites: how many tokens each block keeps, within a budget of MACs.

All of this runs on a copy of the model on `meta`; the user's model is not touched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltm.adapters.base import Adapter, Run
from ltm.adapters.blocks import Slot, Tokens, TokenState
from ltm.core.cost import count_macs, meta_copy, meta_images, run_on_meta
from ltm.core.schedule import Grid, ceil_count, ceil_grid, fit_budget, grid_counts, halve
from ltm.core.validation import first_line
from ltm.methods.base import Count, Merger, MethodConfig, Site

# How far below the budget, as a share of it, a plan may end; grids have integer sides.
_CLOSE, _CLOSE_ON_GRIDS = 0.005, 0.02
# How far below it a plan with few sites may end; else all blocks become sites.
_NEAR = 0.03

_COUNTED = (Tensor, bool, int, str, type(None))
"""The arguments with which the cost of a module depends on shapes only."""

Counts = Mapping[int, Count]
"""Tokens after each site, by block."""


class OutOfReachError(ValueError):
    """The network cannot meet a ratio as small as this."""

    def __init__(self, config: MethodConfig, floor: float) -> None:
        super().__init__(
            f"ratio: got {config.ratio}; {config.name} on this network cannot go below "
            f"{floor:.3f} of its MACs."
        )
        self.floor = floor


@dataclass(frozen=True)
class Plan:
    """Sites and what they cost."""

    sites: tuple[Site, ...]
    macs_before: int
    macs_after: int


class _Step(NamedTuple):
    """The grids around one block."""

    block: int
    entry: Grid
    """At the start of its stage."""
    before: Grid
    after: Count


class Planner:
    """Makes plans for one model and one input size, and remembers all MACs that it counted."""

    def __init__(
        self,
        model: nn.Module,
        adapter: Adapter,
        config: MethodConfig,
        image_size: tuple[int, int],
    ) -> None:
        self.adapter = adapter
        self.shadow = meta_copy(model)
        adapter.take_images_(self.shadow)
        images = meta_images(self.shadow, image_size)
        self.macs_before = require_macs(self.shadow, images)
        self._counter = _MacCounter(self.shadow, images)
        self._costs: dict[object, int] = {}
        self.layout = adapter.layout(self.shadow, image_size)
        self.set_config_(config)

    def set_config_(self, config: MethodConfig) -> None:
        """Plan for this config from now on."""
        if config.sequences_only and not self.layout.is_sequence:
            raise ValueError(
                f"method: got {config.name}; it merges sequences of tokens, and those of this "
                "network form grids: take another method."
            )
        self.config = config
        self.keeps_grid = not self.layout.is_sequence and config.keeps_grid()
        self.chosen = self._chosen_blocks()
        self.step = self.layout.multiple

    def with_config(self, config: MethodConfig) -> Planner:
        """A planner of the same model for another config, with the same memory of MACs."""
        other = copy.copy(self)
        other.set_config_(config)
        return other

    def plan(self) -> Plan:
        """The plan that the config asks for; a ValueError if there is none."""
        config = self.config
        if config.counts is not None:
            counts = self._explicit(config.counts)
        elif config.per_block is not None:
            counts = self._per_block(config.per_block)
        elif config.num_tokens is not None:
            counts = self._leaving(config.num_tokens)
        else:
            counts = self._within(config.ratio or 1.0)
        return Plan(self.sites(counts), self.macs_before, self.cost(counts))

    def sites(self, counts: Counts) -> tuple[Site, ...]:
        """The sites for some counts; chosen blocks that keep all their tokens are sites, too."""
        return self._grid_sites(counts) if self.keeps_grid else self._run_sites(counts)

    def cost(self, counts: Counts) -> int:
        """MACs of the converted network, with the informative step counted."""
        sites = self.sites(counts)
        key = self.config.with_amount(ratio=1.0), sites
        if key not in self._costs:
            self._costs[key] = self._count(sites)
        return self._costs[key]

    def _count(self, sites: tuple[Site, ...]) -> int:
        state = TokenState()
        self.adapter.convert_(self.shadow, self.config, sites, state)
        try:
            for module in self.shadow.modules():
                if isinstance(module, Merger):
                    module.activate_()
            config = self.config.with_amount(ratio=1.0)
            return self._counter.count(self.adapter.units(self.shadow), config, state)
        finally:
            self.adapter.revert_(self.shadow)

    def _chosen_blocks(self) -> tuple[int, ...]:
        num_blocks = len(self.layout.blocks)
        if self.config.sites is None:
            if not self.layout.is_sequence:
                return tuple(range(num_blocks))
            chosen = self.config.choose_sites(num_blocks)
            if self.config.num_tokens is None:
                return chosen
            # Merging ends before the last block, because what enters it may be read, too.
            before = range(max(1, num_blocks - 1))
            return tuple(block for block in chosen if block in before) or tuple(before)
        outside = [site for site in self.config.sites if not 0 <= site < num_blocks]
        if outside:
            raise ValueError(
                f"sites: got {outside[0]}; this network has blocks 0 to {num_blocks - 1}."
            )
        return self.config.sites

    def _explicit(self, counts: tuple[Count, ...]) -> Counts:
        if len(counts) != len(self.chosen):
            raise ValueError(
                f"counts: got {len(counts)} of them; there are {len(self.chosen)} merging sites "
                f"(blocks {', '.join(map(str, self.chosen))})."
            )
        return dict(zip(self.chosen, counts, strict=True))

    def _per_block(self, ratio: float) -> Counts:
        if self.keeps_grid:
            return {
                step.block: step.after for step in self._along(lambda _, g: ceil_grid(g, ratio))
            }
        counts: dict[int, Count] = {}
        for run in self.layout.runs:
            left = run.num_in
            for block in self._chosen_in(run):
                left = ceil_count(left, ratio)
                counts[block] = left
        return counts

    def _leaving(self, num_tokens: int) -> Counts:
        """Counts as the method spreads them over the sites, with `num_tokens` after the last."""
        if not self.layout.is_sequence:
            raise ValueError(
                f"num_tokens: got {num_tokens}; the tokens of this network form grids: give ratio, "
                "per_block or counts."
            )
        (run,) = self.layout.runs
        if num_tokens > run.num_in:
            raise ValueError(
                f"num_tokens: got {num_tokens}; this network has {run.num_in} patch tokens."
            )
        last = self.chosen[-1]
        # Budget and cost are the last count, so this is the weakest strength that is enough.
        left: Callable[[Any], int] = itemgetter(last)
        fit = fit_budget(self._at_strength, left, num_tokens, tolerance=1e-6, steps=50)
        assert fit is not None
        counts: Mapping[int, Any] = fit.counts
        return {block: max(count, num_tokens) for block, count in counts.items()}

    def _within(self, ratio: float) -> Counts:
        if ratio == 1:
            return {}
        counts = self._with_few_sites(ratio)
        return self._fitted(ratio) if counts is None else counts

    def _with_few_sites(self, ratio: float) -> Counts | None:
        """A plan with the layout's preferred sites, if it comes close to the budget."""
        few = self.layout.sites
        if few is None or not self.config.prefers_few or self.config.sites is not None:
            return None
        if not self.keeps_grid and all(len(run.blocks) == 1 for run in self.layout.runs):
            return (
                None  # tokens are restored after each block, so a site saves within its block only
            )
        everywhere, self.chosen = self.chosen, few
        for step in dict.fromkeys((self.layout.multiple, 1) if self.keeps_grid else (1,)):
            self.step = step
            with suppress(ValueError):  # the budget is out of reach with so few sites
                counts = self._fitted(ratio)
                if self.cost(counts) >= (1 - _NEAR) * ratio * self.macs_before:
                    return counts
        self.chosen, self.step = everywhere, self.layout.multiple
        return None

    def _fitted(self, ratio: float) -> Counts:
        budget = ratio * self.macs_before
        close = _CLOSE_ON_GRIDS if self.keeps_grid else _CLOSE
        fit = fit_budget(self._at_strength, self.cost, budget, tolerance=close)
        if fit is None:
            floor = self.cost(self._at_strength(1.0)) / self.macs_before
            raise OutOfReachError(self.config, floor)
        return self._relaxed(fit.counts, fit.cost, budget) if self.keeps_grid else fit.counts

    def _at_strength(self, strength: float) -> Counts:
        if self.keeps_grid:
            return self._grid_at([strength] * len(self.layout.blocks))
        counts: dict[int, Count] = {}
        for run in self.layout.runs:
            blocks = self._chosen_in(run)
            depth = len(self.layout.blocks) if self.layout.is_sequence else None
            spread = self.config.spread(strength, run.num_in, blocks, depth)
            counts.update(zip(blocks, spread, strict=True))
        return counts

    def _grid_at(self, strengths: Sequence[float]) -> Counts:
        """Grids at a strength per block; blocks that are not chosen do not merge."""
        chosen = [s if index in self.chosen else 0.0 for index, s in enumerate(strengths)]
        grids = grid_counts(chosen, self._entry(), self.layout.stage_sizes, self.step)
        return {index: grids[index] for index in self.chosen}

    def _relaxed(self, counts: Counts, cost: float, budget: float) -> Counts:
        """Spend what integer sides leave of the budget where merging is strongest."""
        current = dict(counts)
        tried: set[str] = set()
        while cost < (1 - _CLOSE_ON_GRIDS) * budget:
            sites = sorted(self._grid_sites(current), key=lambda site: site.num_out / site.num_in)
            options = [(s.block, larger) for s in sites for larger in self._larger(s)]
            for block, larger in options:
                candidate = current | {block: larger}
                if repr(candidate) in tried:
                    continue
                tried.add(repr(candidate))
                candidate_cost = self.cost(candidate)
                if candidate_cost <= budget:
                    current, cost = candidate, candidate_cost
                    break
            else:
                break
        return current

    def _larger(self, site: Site) -> list[Grid]:
        """The grids that are one step larger, along the side that shrank more first."""
        assert site.grid_in is not None
        assert site.grid_out is not None
        (h, w), (most_h, most_w) = site.grid_out, site.grid_in
        step = self.step
        taller = (min(most_h, h // step * step + step), w)
        wider = (h, min(most_w, w // step * step + step))
        grids = [taller, wider] if h / most_h < w / most_w else [wider, taller]
        return [grid for grid in grids if grid != site.grid_out]

    def _chosen_in(self, run: Run) -> tuple[int, ...]:
        return tuple(block for block in run.blocks if block in self.chosen)

    def _entry(self) -> Grid:
        assert self.layout.entry is not None
        return self.layout.entry

    def _run_sites(self, counts: Counts) -> tuple[Site, ...]:
        sites: list[Site] = []
        for run in self.layout.runs:
            left = run.num_in
            for block in self._chosen_in(run):
                count = counts.get(block, left)
                if not isinstance(count, int):
                    raise ValueError(
                        f"counts: got {count} for block {block}; sequences take whole numbers."
                    )
                self._check_count(block, count, left)
                sites.append(self._site(block, run.grid, left, count))
                left = count
        return tuple(sites)

    def _check_count(self, block: int, count: int, left: int) -> None:
        if not 1 <= count <= left:
            raise ValueError(
                f"counts: got {count} for block {block}; 1 to {left} of its tokens can be left."
            )

    def _grid_sites(self, counts: Counts) -> tuple[Site, ...]:
        sites: list[Site] = []
        for block, entry, grid, out in self._along(counts.get):
            if isinstance(out, int):
                raise ValueError(
                    f"counts: got {out} for block {block}; grids take (height, width) pairs."
                )
            if not (1 <= out[0] <= grid[0] and 1 <= out[1] <= grid[1]):
                raise ValueError(
                    f"counts: got {out} for block {block}; its tokens form a grid of "
                    f"{grid[0]} x {grid[1]}."
                )
            site = self._site(block, entry, grid[0] * grid[1], out[0] * out[1])
            sites.append(dataclasses.replace(site, grid_in=grid, grid_out=out))
        return tuple(sites)

    def _along(self, after: Callable[[int, Grid], Count]) -> Iterator[_Step]:
        """Go through the chosen blocks of a grid network; `after` gives the grid after each."""
        grid: Any = self._entry()
        entry, stage = grid, self.layout.blocks[0].stage
        for index, block in enumerate(self.layout.blocks):
            if block.stage != stage:
                stage, grid = block.stage, halve(grid)
                entry = grid
            if index in self.chosen:
                step = _Step(index, entry, grid, after(index, grid))
                yield step
                grid = step.after

    def _site(self, block: int, grid: Grid, num_in: int, num_out: int) -> Site:
        return Site(
            block=block,
            depth=len(self.layout.blocks),
            width=self.layout.blocks[block].width,
            num_prefix=self.layout.num_prefix,
            num_classes=self.layout.num_classes,
            grid=grid,
            num_in=num_in,
            num_out=num_out,
        )


def require_macs(shadow: nn.Module, images: Tensor) -> int:
    """The MACs of a network; a ValueError if it cannot take images of this size."""
    try:
        return count_macs(shadow, images)
    except (RuntimeError, AssertionError, ZeroDivisionError) as error:
        height, width = images.shape[-2:]
        raise ValueError(
            f"image_size: the model cannot take images of {height} x {width} pixels "
            f"({first_line(error)})."
        ) from error


class _Counted(NamedTuple):
    """What is known about a module that was run with the same shapes before."""

    macs: int
    shape: tuple[int, ...]
    tokens: Tokens
    """What it leaves for the next block, with only the merges that it added itself."""


class _MacCounter:
    """Counts the MACs of one network in many conversions.

    On `meta` only shapes matter, so a module that was counted with equal shapes is not run again.
    """

    def __init__(self, shadow: nn.Module, images: Tensor) -> None:
        self.shadow, self.images = shadow, images
        self._counted: dict[object, _Counted] = {}
        self._counter = FlopCounterMode(display=False)
        self._passed = 0
        """MACs of the modules that were not run again."""

    def count(self, units: Iterable[nn.Module], config: object, state: TokenState) -> int:
        """MACs of the network as it is; `units` are the blocks that depend on `config`."""
        blocks = {unit: (config, _signature(unit)) for unit in units}
        others = {module: module for module in _apart_from(self.shadow, set(blocks))}
        self._passed, self._counter = 0, FlopCounterMode(display=False)
        for module, what in (*blocks.items(), *others.items()):
            module.forward = self._watched(module, what, state)
        try:
            with self._counter:
                run_on_meta(self.shadow, self.images)
            return self._counter.get_total_flops() // 2 + self._passed
        finally:
            for module in (*blocks, *others):
                del module.forward

    def _watched(self, module: nn.Module, what: object, state: TokenState) -> Callable[..., Any]:
        forward, slot = module.forward, getattr(module, "slot", None)

        def run(*args: Any, **options: Any) -> Any:
            given = _shapes((*args, *options.values()))
            if given is None:
                return forward(*args, **options)
            key = what, given, tuple(options)
            if key in self._counted:
                x = next(iter((*args, *options.values())))
                return self._pass_over(x, self._counted[key], slot, state)
            before, merges = self._counter.get_total_flops(), _entering(slot, state).merges
            out = forward(*args, **options)
            if isinstance(out, Tensor):
                left = Tokens() if slot is None else state.left_by(slot.index)
                new = left.merges[len(merges) :]
                added = dataclasses.replace(left, merges=new, carry=None, labels=None)
                macs = (self._counter.get_total_flops() - before) // 2
                self._counted[key] = _Counted(macs, tuple(out.shape), added)
            return out

        return run

    def _pass_over(
        self, x: Tensor, known: _Counted, slot: Slot | None, state: TokenState
    ) -> Tensor:
        self._passed += known.macs
        if slot is not None:
            merges = (*_entering(slot, state).merges, *known.tokens.merges)
            state.leave(slot.index, dataclasses.replace(known.tokens, merges=merges))
        return x.new_empty(known.shape)


def _shapes(given: tuple[Any, ...]) -> tuple[object, ...] | None:
    """The shapes of a module's arguments; None if some are not tensors or plain values."""
    tensors = given and isinstance(given[0], Tensor)
    if not tensors or not all(isinstance(x, _COUNTED) for x in given):
        return None
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in given)


def _entering(slot: Slot | None, state: TokenState) -> Tokens:
    """What is known about the tokens that enter a block."""
    if slot is None or slot.starts:
        return Tokens()
    return state.left_by(slot.index - 1)


def _apart_from(model: nn.Module, units: set[nn.Module]) -> list[nn.Module]:
    """The largest modules that neither hold any of the units nor are part of one."""
    found: list[nn.Module] = []
    for child in model.children():
        if child not in units:
            holds = not units.isdisjoint(child.modules())
            found += _apart_from(child, units) if holds else [child]
    return found


def _signature(unit: nn.Module) -> tuple[object, ...]:
    """All that the cost of a unit depends on, besides the shape of its input."""
    weights = tuple(tuple(p.shape) for n, p in unit.named_parameters() if "merger" not in n)
    mergers = ((path, m) for path, m in unit.named_modules() if isinstance(m, Merger))
    sites = tuple((path, type(m).__name__, m.site) for path, m in mergers)
    return type(unit).__name__, weights, sites, getattr(unit, "window", None)
