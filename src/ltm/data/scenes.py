"""Generated pictures: a scene is drawn from a seed, then painted.

Coordinates and lengths are fractions of the image side, so one scene can be painted at any size.
Shapes are signed distances on the pixel grid, so edges are smooth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NUM_STROKES = 6
_CELLS = (4, 12)  # cells a side of the two octaves of background clutter
_PLACEMENT_TRIES = 12
_MAX_ANGLE = 0.4  # radians, either way
_COS30 = float(np.sqrt(3.0)) / 2
_OUTLINE = 0.1  # radii that textures leave free, lest dark stripes dissolve the shape

Array = NDArray[np.floating]


def _box(u: Array, v: Array, half_width: float, half_height: float) -> Array:
    return np.maximum(np.abs(u) - half_width, np.abs(v) - half_height)


# Signed distances of shapes that fill about the unit disc.
_DISTANCES: dict[str, Callable[[Array, Array], Array]] = {
    "disc": lambda u, v: np.sqrt(u * u + v * v) - 0.9,
    "triangle": lambda u, v: np.maximum(np.abs(u) * _COS30 + v * 0.5, -v) - 0.52,
    "cross": lambda u, v: np.minimum(_box(u, v, 0.95, 0.3), _box(v, u, 0.95, 0.3)),
    "ring": lambda u, v: np.abs(np.sqrt(u * u + v * v) - 0.7) - 0.24,
    "bar": lambda u, v: _box(u, v, 0.98, 0.4),
}
# Waves of a frequency and a phase; where they are high, a shape has its second colour.
_PATTERNS: dict[str, Callable[[Array, Array, float, float], Array]] = {
    "plain": lambda u, *_: np.full_like(u, -1.0),
    "striped": lambda u, _, f, p: np.sin(f * u + p),
    "checked": lambda u, v, f, p: 2.0 * np.sin(0.7 * f * u + p) * np.sin(0.7 * f * v + p),
    "dotted": lambda u, v, f, p: np.cos(f * u + p) + np.cos(f * v + p) - 0.9,
}
_CLASSES = [(texture, shape) for texture in _PATTERNS for shape in _DISTANCES]


@dataclass(frozen=True, kw_only=True)
class SceneObject:
    """One textured shape: what it is, where it is, and its two colours."""

    label: int
    x: float
    y: float
    radius: float
    angle: float
    frequency: float
    phase: float
    colour: Array
    second_colour: Array


@dataclass(frozen=True, kw_only=True)
class Clutter:
    """The background: a colour gradient, two octaves of smooth noise, waves, strokes, grain."""

    base: Array
    gradient: Array  # 2 x 3: colour change along x and y
    octaves: tuple[Array, ...]  # each 3 x cells+1 x cells+1
    wave: tuple[float, float, float, float]  # amplitude, angle, frequency, phase
    stroke_ends: Array  # strokes x 4: x0, y0, x1, y1
    stroke_widths: Array
    stroke_colours: Array  # strokes x 3
    grain: float
    grain_seed: int


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A background and the objects on it, the last one in front."""

    clutter: Clutter
    objects: tuple[SceneObject, ...]


def class_names(num_classes: int) -> tuple[str, ...]:
    """Name the first `num_classes` pairs of texture and shape, such as "striped cross"."""
    if not 2 <= num_classes <= len(_CLASSES):
        raise ValueError(
            f"num_classes is {num_classes}, but generated shapes have 2 to {len(_CLASSES)} classes"
        )
    return tuple(f"{texture} {shape}" for texture, shape in _CLASSES[:num_classes])


def draw_scene(
    rng: np.random.Generator, labels: tuple[int, ...], radius_range: tuple[float, float]
) -> Scene:
    """Draw clutter and one object per label; objects that find no free place are left out."""
    clutter = _draw_clutter(rng)
    objects: list[SceneObject] = []
    for label in labels:
        placed = _draw_object(rng, label, radius_range, objects)
        if placed is not None:
            objects.append(placed)
    return Scene(clutter=clutter, objects=tuple(objects))


def _draw_clutter(rng: np.random.Generator) -> Clutter:
    ends = rng.random((_NUM_STROKES, 4), dtype=np.float32)
    # Strokes are about as long as objects are wide, lest their length alone give them away.
    ends[:, 2:] = ends[:, :2] + (ends[:, 2:] - 0.5) * 0.7
    base = rng.uniform(0.15, 0.4, 3).astype(np.float32)
    colours = base + 0.5 * (rng.random((_NUM_STROKES, 3), dtype=np.float32) - 0.4)
    return Clutter(
        base=base,
        gradient=rng.uniform(-0.1, 0.1, (2, 3)).astype(np.float32),
        octaves=tuple(
            rng.uniform(-0.07, 0.07, (3, cells + 1, cells + 1)).astype(np.float32)
            for cells in _CELLS
        ),
        wave=(
            rng.uniform(0.0, 0.05),
            rng.uniform(0.0, np.pi),
            rng.uniform(25.0, 60.0),
            rng.uniform(0.0, 2 * np.pi),
        ),
        stroke_ends=ends,
        stroke_widths=rng.uniform(0.008, 0.03, _NUM_STROKES).astype(np.float32),
        stroke_colours=colours,
        grain=rng.uniform(0.01, 0.05),
        grain_seed=int(rng.integers(2**63)),
    )


def _draw_object(
    rng: np.random.Generator,
    label: int,
    radius_range: tuple[float, float],
    others: list[SceneObject],
) -> SceneObject | None:
    place = _find_place(rng, radius_range, others)
    if place is None:
        return None
    x, y, radius = place
    # Bright on dark, in any hue: networks of a few thousand steps do not learn both polarities.
    colour = rng.uniform(0.6, 1.0, 3)
    second = colour * rng.uniform(0.5, 0.7)
    return SceneObject(
        label=label,
        x=x,
        y=y,
        radius=radius,
        angle=rng.uniform(-_MAX_ANGLE, _MAX_ANGLE),
        frequency=rng.uniform(8.5, 11.5),
        phase=rng.uniform(0.0, 2 * np.pi),
        colour=colour.astype(np.float32),
        second_colour=second.astype(np.float32),
    )


def _find_place(
    rng: np.random.Generator, radius_range: tuple[float, float], others: list[SceneObject]
) -> tuple[float, float, float] | None:
    """Draw a centre and radius that keep most of every object visible."""
    for _ in range(_PLACEMENT_TRIES):
        radius = rng.uniform(*radius_range)
        margin = 0.85 * radius  # a shape may touch or slightly leave the frame
        x, y = rng.uniform(margin, 1.0 - margin, 2)
        if all(
            np.hypot(x - other.x, y - other.y) > 0.9 * (radius + other.radius) for other in others
        ):
            return float(x), float(y), float(radius)
    return None


class Painting(NamedTuple):
    """An image (3 x H x W, 8 bit) and, per object of its scene, the pixels where it is in front."""

    image: NDArray[np.uint8]
    masks: NDArray[np.bool_]


def paint(scene: Scene, size: int) -> Painting:
    """Paint a scene as a square image, with the visible mask of every object."""
    canvas = _paint_clutter(scene.clutter, size)
    masks = np.zeros((len(scene.objects), size, size), dtype=bool)
    for index, item in enumerate(scene.objects):
        window, coverage = _paint_object_(canvas, item)
        inside = coverage >= 0.5
        masks[:index, window[0], window[1]] &= ~inside
        masks[index, window[0], window[1]] = inside
    _add_grain_(canvas, scene.clutter)
    np.clip(canvas, 0.0, 1.0, out=canvas)
    canvas *= 255.0
    canvas += 0.5
    return Painting(canvas.astype(np.uint8), masks)


@lru_cache(maxsize=16)
def _centres(size: int) -> Array:
    """Return the pixels' centres along one side."""
    return ((np.arange(size) + 0.5) / size).astype(np.float32)


@lru_cache(maxsize=32)
def _interpolation(size: int, cells: int) -> Array:
    """Return the size x (cells + 1) matrix of linear interpolation between grid points."""
    position = _centres(size) * cells
    left = np.minimum(position.astype(int), cells - 1)
    share = position - left
    weights = np.zeros((size, cells + 1), dtype=np.float32)
    rows = np.arange(size)
    weights[rows, left] = 1.0 - share
    weights[rows, left + 1] = share
    return weights


def _paint_clutter(clutter: Clutter, size: int) -> Array:
    along = _centres(size)
    offset = along - 0.5
    canvas = (
        clutter.base[:, None, None]
        + clutter.gradient[0][:, None, None] * offset
        + clutter.gradient[1][:, None, None] * offset[:, None]
    )
    for grid in clutter.octaves:
        weights = _interpolation(size, grid.shape[-1] - 1)
        canvas += weights @ grid @ weights.T
    amplitude, angle, frequency, phase = clutter.wave
    x = along * np.float32(frequency * np.cos(angle))
    y = along * np.float32(frequency * np.sin(angle)) + np.float32(phase)
    canvas += np.float32(amplitude) * np.sin(x + y[:, None])
    _paint_strokes_(canvas, clutter)
    return canvas


def _paint_strokes_(canvas: Array, clutter: Clutter) -> None:
    """Draw line segments; where several cross, the nearest one's colour shows."""
    size = canvas.shape[-1]
    along = _centres(size)
    x0, y0, x1, y1 = (column[:, None, None] for column in clutter.stroke_ends.T)
    dx, dy = x1 - x0, y1 - y0
    px, py = along - x0, along[:, None] - y0
    share = np.clip((px * dx + py * dy) / (dx * dx + dy * dy + 1e-6), 0.0, 1.0)
    px, py = px - share * dx, py - share * dy
    distance = np.sqrt(px * px + py * py) - clutter.stroke_widths[:, None, None]
    nearest = distance.argmin(0)
    coverage = np.clip(0.5 - size * distance.min(0), 0.0, 1.0)
    canvas += coverage * (clutter.stroke_colours.T[:, nearest] - canvas)


def _paint_object_(canvas: Array, item: SceneObject) -> tuple[tuple[slice, slice], Array]:
    """Paint one object and return its window of the canvas and its coverage in there."""
    size = canvas.shape[-1]
    rows, columns = _span(item.y, item.radius, size), _span(item.x, item.radius, size)
    dx = (_centres(size)[columns] - item.x) / item.radius
    dy = ((_centres(size)[rows] - item.y) / item.radius)[:, None]
    cos, sin = np.float32(np.cos(item.angle)), np.float32(np.sin(item.angle))
    u, v = cos * dx + sin * dy, cos * dy - sin * dx
    scale = np.float32(item.radius * size)
    texture, shape = _CLASSES[item.label]
    distance = _DISTANCES[shape](u, v) * scale
    coverage = np.clip(0.5 - distance, 0.0, 1.0)
    inner = np.clip(0.5 - distance - _OUTLINE * scale, 0.0, 1.0)
    wave = _PATTERNS[texture](u, v, item.frequency, item.phase)
    pattern = inner * np.clip(0.5 + 1.5 * wave, 0.0, 1.0)
    change = item.second_colour - item.colour
    colours = item.colour[:, None, None] + change[:, None, None] * pattern
    part = canvas[:, rows, columns]
    part += coverage * (colours - part)
    return (rows, columns), coverage


def _span(centre: float, radius: float, size: int) -> slice:
    """Return the pixels that a shape can reach; a bar's corner is 1.06 radii away."""
    reach = 1.15 * radius
    low, high = int((centre - reach) * size), int((centre + reach) * size) + 2
    return slice(max(low, 0), min(high, size))


def _add_grain_(canvas: Array, clutter: Clutter) -> None:
    """Add pixel noise; its own seed keeps the scene independent of the image size."""
    noise = np.random.default_rng(clutter.grain_seed).random(canvas.shape, dtype=np.float32)
    noise -= 0.5
    noise *= np.float32(2 * clutter.grain)
    canvas += noise
