"""Pictures of what merging does: weights of a token, groups of patches, films through the blocks.

`weights_figure` and `groups_figure` draw sheets like the paper's figure, with a column per image
and a row per method; `layer_frames` and `film_bytes` make a film of one image.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ltm.core.schedule import Grid
from ltm.data.decoding import read_image, to_rgb
from ltm.data.folders import walk_images
from ltm.data.limits import split_limits
from ltm.data.shapes import example_pictures
from ltm.data.transforms import ImageSpec, evaluation_transform
from ltm.report.tracing import DROPPED, SiteMap, Traces, at_block

Pixels = NDArray[np.uint8]
"""An image, height x width x 3."""

NamedPicture = tuple[str, Image.Image]

NUM_PICTURES = 5
"""Pictures in a report."""

TARGET_COLOUR = (230, 30, 40)
_FAINT = 0.35


@dataclass(frozen=True, eq=False, kw_only=True)
class Scenes:
    """Images in two forms: as pixels to look at, and as the network's input."""

    names: tuple[str, ...]
    pixels: tuple[Pixels, ...]
    inputs: Tensor

    def __len__(self) -> int:
        return len(self.pixels)


def read_pictures(
    images: Sequence[str | Path | Image.Image], limit: int | None = None
) -> list[NamedPicture]:
    """Open images, image files and folders of images; anything else is a ValueError."""
    found = (one for image in images for one in _opened(image))
    return [
        (name or f"image {number}", picture)
        for number, (name, picture) in enumerate(islice(found, limit), start=1)
    ]


def _opened(image: str | Path | Image.Image) -> Iterator[NamedPicture]:
    """An image, whose name is empty, or the images of a path, by their names."""
    if isinstance(image, Image.Image):
        yield "", to_rgb(image)
        return
    name, limits, _ = split_limits(image)
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such image or folder")
    files = iter((path,)) if path.is_file() else map(Path, walk_images(path))
    file = None
    for file in files:
        yield file.stem, read_image(file, limits)
    if file is None:
        raise ValueError(f"{path} holds no images: give image files or a folder of them")


def generated_pictures(number: int = NUM_PICTURES) -> list[NamedPicture]:
    """Painted pictures, for reports that must not show photographs."""
    return [
        (picture.name.replace(", ", ",\n"), picture.image) for picture in example_pictures(number)
    ]


def data_pictures(dataset: Any, class_names: Sequence[str] = ()) -> list[NamedPicture]:
    """A few images, evenly spread over a data set, named by their classes or by number.

    `class_names` are better names than the data set's own, such as those that a network knows. Of a
    list of synonyms the first is enough.
    """
    few = dataset.take(NUM_PICTURES).with_transform(None)
    names: Sequence[str] = class_names or few.class_names
    items = (few[index] for index in range(len(few)))
    return [
        (names[int(label)].partition(",")[0] if names else f"image {number}", image)
        for number, (image, label) in enumerate(items, start=1)
    ]


def prepare(images: Sequence[Image.Image], names: Sequence[str], spec: ImageSpec) -> Scenes:
    """Resize and crop images as in evaluation; keep their pixels, and normalise them as inputs."""
    transform = evaluation_transform(spec)
    bytes_ = torch.stack([transform(image) for image in images])
    mean, std = (255 * torch.tensor(v)[:, None, None] for v in (spec.mean, spec.std))
    pixels = tuple(image.permute(1, 2, 0).contiguous().numpy() for image in bytes_)
    return Scenes(names=tuple(names), pixels=pixels, inputs=(bytes_.float() - mean) / std)


def spread_cells(cells: NDArray, size: tuple[int, int]) -> NDArray:
    """Give every pixel the value of its cell; sides need not be multiples of the cells'."""
    rows = np.arange(size[0]) * cells.shape[0] // size[0]
    columns = np.arange(size[1]) * cells.shape[1] // size[1]
    return cells[rows][:, columns]


def _weight_colours() -> ListedColormap:
    """From dark to bright, without the ends of the map, which cannot be seen on a picture."""
    return ListedColormap(colormaps["inferno"](np.linspace(0.2, 0.9, 256)), name="weights")


def paint_weights(pixels: Pixels, weights: NDArray[np.float32]) -> Pixels:
    """Colour the patches of one token by weight, over a faint grey image."""
    grey = pixels.mean(axis=2, keepdims=True)
    faint = np.repeat(255 - _FAINT * (255 - grey), 3, axis=2)
    largest = float(weights.max())
    if largest <= 0:
        return faint.astype(np.uint8)
    heat = spread_cells(weights / largest, pixels.shape[:2])[..., None]
    colours = _weight_colours()(heat[..., 0])[..., :3] * 255
    opacity = np.where(heat > 0, 0.85, 0.0)
    return (faint * (1 - opacity) + colours * opacity).astype(np.uint8)


def paint_groups(pixels: Pixels, groups: NDArray[np.int64]) -> Pixels:
    """Paint patches that became one token in their mean colour, with a line around them.

    Patches that did not merge keep their pixels; dropped ones are blank.
    """
    painted = pixels.astype(np.float64)
    cells = spread_cells(groups, pixels.shape[:2])
    values, counts = np.unique(groups, return_counts=True)
    for group in values[(counts > 1) | (values < 0)]:
        inside = cells == group
        painted[inside] = 255 if group < 0 else painted[inside].mean(axis=0)
    border = np.zeros(cells.shape, dtype=bool)
    border[1:] |= cells[1:] != cells[:-1]
    border[:, 1:] |= cells[:, 1:] != cells[:, :-1]
    painted[border] = 0.25 * painted[border]
    return painted.astype(np.uint8)


def enlarge(pixels: Pixels, least: int = 224) -> Pixels:
    """Repeat the pixels of small images, so that lines and boxes can be seen."""
    factor = max(1, -(-least // max(pixels.shape[:2])))
    return np.repeat(np.repeat(pixels, factor, axis=0), factor, axis=1)


def _captioned(pictures: Sequence[Pixels], captions: Sequence[str]) -> Image.Image:
    """Put pictures of one size side by side, a line of text above each."""
    height, width = pictures[0].shape[:2]
    gap, margin = 8, 22
    size = (len(pictures) * (width + gap) - gap, height + margin)
    sheet = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=13)
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left = index * (width + gap)
        sheet.paste(Image.fromarray(picture), (left, margin))
        draw.text((left, 3), caption, fill=(20, 20, 20), font=font)
    return sheet


def figure_bytes(figure: Figure, kind: str = "png", dpi: int = 110) -> bytes:
    """Render a figure; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def data_uri(content: bytes, media_type: str) -> str:
    """Content as an address that needs no file."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


_CELL = 1.75
"""Inches per picture."""
_RED = tuple(value / 255 for value in TARGET_COLOUR)


def choose_target(pixels: Pixels, groups: NDArray[np.int64]) -> Grid:
    """The most typical patch of the group whose colour stands out most.

    Without groups it is the patch in the middle.
    """
    values, counts = np.unique(groups[groups != DROPPED], return_counts=True)
    merged = values[counts > 1]
    if len(merged) == 0:
        return groups.shape[0] // 2, groups.shape[1] // 2
    cells = spread_cells(np.arange(groups.size).reshape(groups.shape), pixels.shape[:2])
    sums = np.zeros((groups.size, 3))
    np.add.at(sums, cells.ravel(), pixels.reshape(-1, 3))
    colours = sums / np.bincount(cells.ravel(), minlength=groups.size)[:, None]
    typical = np.median(colours, axis=0)

    def salience(group: int) -> float:
        members = colours[groups.ravel() == group]
        return float(np.linalg.norm(members.mean(0) - typical) * min(len(members), 8) ** 0.5)

    group = max(merged.tolist(), key=salience)
    members = np.flatnonzero(groups.ravel() == group)
    distance = np.linalg.norm(colours[members] - colours[members].mean(0), axis=1)
    row, column = divmod(int(members[distance.argmin()]), groups.shape[1])
    return row, column


def weights_figure(
    scenes: Scenes, traces: Traces, block: int, targets: Sequence[Grid] = ()
) -> Figure:
    """The paper's figure for one block.

    Targets are patches (row, column) on the grid of the last method; by default they are chosen
    from its groups.
    """
    maps = maps_at(traces, block, len(scenes))
    reference = list(maps.values())[-1]
    chosen = targets or _default_targets(scenes, reference)
    figure, axes = _sheet(scenes, ["target", *maps])
    for column, (pixels, target) in enumerate(zip(scenes.pixels, chosen, strict=True)):
        _mark(axes[0][column], target, reference.grid, enlarge(pixels).shape)
        for row, site in enumerate(maps.values(), 1):
            weights = site.of_target(column, rescale(target, reference.grid, site.grid))
            painted = enlarge(paint_weights(pixels, weights))
            _show(axes[row][column], painted, _weights_line(weights))
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, 1), _weight_colours()), ax=axes, fraction=0.02, pad=0.01
    )
    bar.set_label("weight / largest", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    return figure


def groups_figure(scenes: Scenes, traces: Traces, block: int) -> Figure:
    """Which patches are one token after a block: images in the first row, a row per method."""
    maps = maps_at(traces, block, len(scenes))
    figure, axes = _sheet(scenes, ["image", *maps])
    for column, pixels in enumerate(scenes.pixels):
        for row, site in enumerate(maps.values(), 1):
            line = f"{site.num_tokens(column)} of {site.grid[0] * site.grid[1]} tokens"
            painted = paint_groups(enlarge(pixels), site.group_grid(column))
            _show(axes[row][column], painted, line)
    return figure


def target_tokens(
    scenes: Scenes, traces: Traces, block: int, targets: Sequence[Grid] = ()
) -> list[dict[str, Any]]:
    """The numbers of the pictures: tokens left, and the weights of the target's token."""
    maps = maps_at(traces, block, len(scenes))
    reference = list(maps.values())[-1]
    rows: list[dict[str, Any]] = []
    for index, target in enumerate(targets or _default_targets(scenes, reference)):
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


def maps_at(traces: Traces, block: int, num_images: int) -> dict[str, SiteMap]:
    """Every method's tokens as they leave a block."""
    grids = [site.grid for maps in traces.values() for site in maps if site.block <= block]
    if not grids:
        raise ValueError(f"block {block}: no method has merged anything by then")
    return {name: at_block(maps, block, grids[0], num_images) for name, maps in traces.items()}


def _default_targets(scenes: Scenes, site: SiteMap) -> list[Grid]:
    """A target for every image, from the groups of one method."""
    return [
        choose_target(pixels, site.group_grid(index)) for index, pixels in enumerate(scenes.pixels)
    ]


def rescale(target: Grid, before: Grid, after: Grid) -> Grid:
    """The place of a patch on another grid, as methods shrink a network's grids differently."""
    return target[0] * after[0] // before[0], target[1] * after[1] // before[1]


def _weights_line(weights: NDArray[np.float32]) -> str:
    count = int((weights > 0).sum())
    if count == 0:
        return "dropped"
    return "alone" if count == 1 else f"{count} patches, up to {weights.max():.2f}"


def _sheet(scenes: Scenes, labels: Sequence[str]) -> tuple[Figure, NDArray]:
    """A column per image and a row per label; the first row shows the images."""
    columns, rows = len(scenes), len(labels)
    size = (_CELL * columns + 0.35, (_CELL + 0.2) * rows + 0.25)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False)
    for column, (name, pixels) in enumerate(zip(scenes.names, scenes.pixels, strict=True)):
        _show(axes[0][column], enlarge(pixels))
        axes[-1][column].set_xlabel(name, fontsize=8)
    for row, label in zip(axes, labels, strict=True):
        row[0].set_ylabel(label, fontsize=9)
    return figure, axes


def _show(axes: Axes, pixels: Pixels, title: str = "") -> None:
    axes.imshow(pixels, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if title:
        axes.set_title(title, fontsize=7)


def _mark(axes: Axes, target: Grid, grid: Grid, shape: tuple[int, ...]) -> None:
    height, width = shape[0] / grid[0], shape[1] / grid[1]
    corner = (target[1] * width - 0.5, target[0] * height - 0.5)
    axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=_RED, linewidth=2))


_FRAME_MILLISECONDS = 900


def layer_frames(scenes: Scenes, traces: Traces, index: int) -> list[Image.Image]:
    """One frame per merging block of any method: their groups in one image, side by side."""
    pixels = enlarge(scenes.pixels[index])
    names = list(traces)
    frames = [_captioned([pixels] * len(names), [f"{name}: image" for name in names])]
    for block in merging_blocks(traces):
        maps = maps_at(traces, block, len(scenes))
        frames.append(
            _captioned(
                [paint_groups(pixels, site.group_grid(index)) for site in maps.values()],
                [f"{n}, block {block}: {m.num_tokens(index)} tokens" for n, m in maps.items()],
            )
        )
    return frames


def merging_blocks(traces: Traces) -> list[int]:
    """The blocks in which at least one method merges."""
    return sorted({site.block for maps in traces.values() for site in maps})


def film_bytes(frames: Sequence[Image.Image]) -> bytes:
    """Frames as an endless GIF; the last one stays longer."""
    durations = [_FRAME_MILLISECONDS] * (len(frames) - 1) + [2 * _FRAME_MILLISECONDS]
    # With a palette per frame, colours would flicker from block to block.
    sheet = Image.new("RGB", (frames[0].width, sum(frame.height for frame in frames)))
    for index, frame in enumerate(frames):
        sheet.paste(frame, (0, index * frame.height))
    palette = sheet.quantize(256)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    first.save(
        buffer, format="GIF", save_all=True, append_images=others, duration=durations, loop=0
    )
    return buffer.getvalue()
