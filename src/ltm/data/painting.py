"""Paint a scene: signed distances on a pixel grid, so edges are smooth and any size works."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ltm.data.scenes import Array, Clutter, Scene, SceneObject

_SQRT3 = float(np.sqrt(3.0))
_OUTLINE = 0.1  # radii that textures leave free, lest dark stripes dissolve the shape


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


def _disc(u: Array, v: Array) -> Array:
    return np.sqrt(u * u + v * v) - 0.9


def _bar(u: Array, v: Array) -> Array:
    return np.maximum(np.abs(u) - 0.98, np.abs(v) - 0.4)


def _triangle(u: Array, v: Array) -> Array:
    side = np.abs(u) * (_SQRT3 / 2) + v * 0.5
    return np.maximum(side, -v) - 0.52


def _cross(u: Array, v: Array) -> Array:
    a, b = np.abs(u), np.abs(v)
    # The farther of the two from its axis is the arm's length, the nearer one its half width.
    return np.maximum(np.maximum(a, b) - 0.95, np.minimum(a, b) - 0.3)


def _ring(u: Array, v: Array) -> Array:
    return np.abs(np.sqrt(u * u + v * v) - 0.7) - 0.24


def _plain(u: Array, v: Array, frequency: float, phase: float) -> Array:  # noqa: ARG001
    return np.zeros_like(u)


def _striped(u: Array, v: Array, frequency: float, phase: float) -> Array:  # noqa: ARG001
    return _sharpen(np.sin(frequency * u + phase))


def _checked(u: Array, v: Array, frequency: float, phase: float) -> Array:
    half = 0.7 * frequency
    return _sharpen(2.0 * np.sin(half * u + phase) * np.sin(half * v + phase))


def _dotted(u: Array, v: Array, frequency: float, phase: float) -> Array:
    return _sharpen(np.cos(frequency * u + phase) + np.cos(frequency * v + phase) - 0.9)


def _sharpen(wave: Array) -> Array:
    return np.clip(0.5 + 1.5 * wave, 0.0, 1.0)


# By name, as `scenes.KINDS` and `scenes.TEXTURES` list them. Shapes fill about the unit disc.
DISTANCES: dict[str, Callable[[Array, Array], Array]] = {
    "disc": _disc,
    "triangle": _triangle,
    "cross": _cross,
    "ring": _ring,
    "bar": _bar,
}
PATTERNS: dict[str, Callable[[Array, Array, float, float], Array]] = {
    "plain": _plain,
    "striped": _striped,
    "checked": _checked,
    "dotted": _dotted,
}


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
    distance = DISTANCES[item.kind](u, v) * scale
    coverage = np.clip(0.5 - distance, 0.0, 1.0)
    inner = np.clip(0.5 - distance - _OUTLINE * scale, 0.0, 1.0)
    pattern = inner * PATTERNS[item.texture](u, v, item.frequency, item.phase)
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
