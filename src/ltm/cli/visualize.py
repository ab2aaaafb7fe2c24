"""`ltm visualize`: what is merged with what, and with which weights, over images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ltm.evaluation.images import expected_images
from ltm.files import check_folder, write_metrics
from ltm.models import ModelSource, method_config, require_least

if TYPE_CHECKING:
    from torch import nn

    from ltm.core.schedule import Grid
    from ltm.report.pictures import NamedPicture, Scenes, Traces

_PER_SHEET = 6


def visualize(
    images: tyro.conf.Positional[tuple[Path, ...]] = (),
    *,
    model: str | None = None,
    pretrained: bool = False,
    weights: Path | None = None,
    run: Path | None = None,
    method: str | None = None,
    against: str | None = None,
    ratio: float = 0.7,
    targets: tuple[str, ...] = (),
    sites: str = "last",
    gif: bool = False,
    limit: int = 12,
    num_classes: int | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    device: str = "auto",
    output: Path = Path("runs/visualize"),
    overwrite: bool = False,
) -> None:
    """Draw merge weights as heatmaps, and which patches became one token.

    One sheet per block in the layout of the paper's figure: images with a marked target patch
    above, then for each method the weights of the token that the target went into. Another sheet
    shows the groups of patches. Without images, generated pictures are drawn.

    Example:
        ltm visualize photos/ --model vit_small_patch16_224 --pretrained --against tome
            --sites all --gif --output runs/pictures

    Args:
        images: image files and folders of them.
        model: timm's name of the network.
        pretrained: take timm's own weights.
        weights: take those of a file in timm's keys, .safetensors or .pth.
        run: a saved network; its own method and schedule are drawn.
        method: how to merge, such as ltm:support=learned,weights=uniform; by default ltm.
        against: another method to draw beside it, at the same ratio; by default tome; none for
            none.
        ratio: share of the multiply-adds that may remain.
        targets: patches as row,column, one for all images or one for each; by default telling ones.
        sites: blocks to draw: last (whose tokens are still attended to), all, or numbers: 3,8.
        gif: also write a film through the blocks for every image.
        limit: draw at most so many images.
        num_classes: by default what the weights have.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        device: auto, cpu, cuda or cuda:N.
        output: folder for the pictures and metrics.json.
        overwrite: replace another run's results there.
    """
    check_folder(output, overwrite=overwrite)
    require_least("limit", limit)

    from ltm.data.config import DataConfig
    from ltm.processes import local_device
    from ltm.report.pictures import generated_pictures, prepare, read_pictures
    from ltm.report.tracing import last_attended_block, trace_models

    where = local_device(device)
    named = read_pictures(images, limit) if images else generated_pictures(_PER_SHEET)
    loaded = ModelSource(
        model=model,
        pretrained=pretrained,
        weights=weights,
        run=run,
        num_classes=num_classes,
        image_size=image_size,
        model_args=model_args,
    ).load(merges=True)
    models = {name: m.to(where) for name, m in _entrants(loaded, method, against, ratio).items()}
    spec = expected_images(loaded, DataConfig())
    chosen = [_target(text) for text in targets]
    if len(chosen) > 1 and len(chosen) != len(named):
        raise ValueError(
            f"targets: there are {len(chosen)} for {len(named)} images; give one or all"
        )
    written: list[Path] = []
    metrics: list[dict[str, Any]] = []
    for number, sheet in enumerate(_sheets(named)):
        names, pictures = zip(*sheet, strict=True)
        scenes = prepare(pictures, names, spec)
        traces = trace_models(models, scenes.inputs)
        first = number * _PER_SHEET
        marks = chosen[first : first + len(sheet)] if len(chosen) > 1 else chosen * len(sheet)
        ending = f"-{number + 1}" if len(named) > _PER_SHEET else ""
        for block in _blocks(sites, traces, last_attended_block(list(models.values())[-1])):
            written += _draw_block(scenes, traces, block, marks, output=output, ending=ending)
            metrics += _measure(scenes, traces, block, marks)
        if gif:
            written += _draw_films(scenes, traces, output, first)
    write_metrics(output, {"model": model or str(run), "methods": list(models), "tokens": metrics})
    for path in written:
        print(path)


def _entrants(
    model: nn.Module, method: str | None, against: str | None, ratio: float
) -> dict[str, nn.Module]:
    """The other method first, as in the paper's figure."""
    import copy

    from ltm.api import (
        conversion_of,
        image_size_of,
        is_merging,
        merge_tokens_,
        report,
        unmerge_tokens_,
    )
    from ltm.methods import BASELINE, DEFAULT
    from ltm.report.curves import display_name

    against = BASELINE if against is None else against
    host = copy.deepcopy(model)
    if is_merging(model):
        if method is not None:
            raise ValueError("method: a saved run merges already; leave --method out")
        method = conversion_of(model).config.name
        ratio = conversion_of(model).config.ratio or min(1.0, report(model).share)
        unmerge_tokens_(host)
    else:
        method = method or DEFAULT
        merge_tokens_(model, method_config(method, ratio))
    found: dict[str, nn.Module] = {}
    if against not in ("none", method):
        merge_tokens_(host, method_config(against, ratio), image_size_of(model))
        found[display_name(against)] = host
    return {**found, display_name(method): model}


def _sheets(named: Sequence[NamedPicture]) -> Iterator[Sequence[NamedPicture]]:
    for start in range(0, len(named), _PER_SHEET):
        yield named[start : start + _PER_SHEET]


def _target(text: str) -> Grid:
    row, comma, column = text.partition(",")
    if not (comma and row.isdigit() and column.isdigit()):
        raise ValueError(f"targets: {text!r} is no patch; write row,column, such as 7,7")
    return int(row), int(column)


def _blocks(sites: str, traces: Traces, telling: int | None) -> list[int]:
    """The blocks to draw, of those in which something merges."""
    from ltm.report.pictures import merging_blocks

    own = merging_blocks(dict([list(traces.items())[-1]]))
    if not own:
        raise ValueError("nothing merges at this ratio: give a smaller one")
    if sites == "last":
        return [telling] if telling in own else own[-1:]
    if sites == "all":
        return own
    asked = sites.split(",")
    known = merging_blocks(traces)
    if not all(text.isdigit() and int(text) in known for text in asked):
        listed = ", ".join(map(str, known))
        raise ValueError(f"sites is {sites}: give last, all, or blocks that merge: {listed}")
    return [int(text) for text in asked]


def _draw_block(
    scenes: Scenes, traces: Traces, block: int, marks: Sequence[Grid], *, output: Path, ending: str
) -> list[Path]:
    from ltm.report.pictures import figure_bytes, groups_figure, weights_figure

    figures = {
        "weights": weights_figure(scenes, traces, block, marks or None),
        "groups": groups_figure(scenes, traces, block),
    }
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, figure in figures.items():
        path = output / f"{kind}-block-{block:02d}{ending}.png"
        path.write_bytes(figure_bytes(figure, dpi=140))
        paths.append(path)
    return paths


def _draw_films(scenes: Scenes, traces: Traces, output: Path, first: int) -> list[Path]:
    from ltm.report.pictures import film_bytes, layer_frames

    paths = []
    for index in range(len(scenes)):
        path = output / f"film-{first + index + 1:02d}.gif"
        path.write_bytes(film_bytes(layer_frames(scenes, traces, index)))
        paths.append(path)
    return paths


def _measure(
    scenes: Scenes, traces: Traces, block: int, marks: Sequence[Grid]
) -> list[dict[str, Any]]:
    """The numbers in the pictures: tokens left, and the weights of the target's token."""
    from ltm.report.pictures import default_targets, maps_at, rescale

    maps = maps_at(traces, block, len(scenes))
    reference = list(maps.values())[-1]
    rows = []
    for index, target in enumerate(marks or default_targets(scenes, reference)):
        for name, site in maps.items():
            weights = site.of_target(index, rescale(target, reference.grid, site.grid))
            rows.append(
                {
                    "image": scenes.names[index].replace("\n", " "),
                    "block": block,
                    "method": name,
                    "num_patches": site.grid[0] * site.grid[1],
                    "num_tokens": site.num_tokens(index),
                    "target": list(target),
                    "target_patches": int((weights > 0).sum()),
                    "target_weights": sorted(weights[weights > 0].tolist(), reverse=True),
                }
            )
    return rows
