"""What is in a generated picture, drawn from a seed, before any pixel is painted.

Coordinates and lengths are fractions of the image side, so one scene can be painted at any size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KINDS = ("disc", "triangle", "cross", "ring", "bar")
TEXTURES = ("plain", "striped", "checked", "dotted")
MAX_CLASSES = len(KINDS) * len(TEXTURES)

_NUM_STROKES = 6
_CELLS = (4, 12)  # cells a side of the two octaves of background clutter
_PLACEMENT_TRIES = 12
_MAX_ANGLE = 0.4  # radians, either way

Array = NDArray[np.floating]


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

    @property
    def kind(self) -> str:
        """Return the shape, one of `KINDS`."""
        return KINDS[self.label % len(KINDS)]

    @property
    def texture(self) -> str:
        """Return the texture, one of `TEXTURES`."""
        return TEXTURES[self.label // len(KINDS)]


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
    if not 2 <= num_classes <= MAX_CLASSES:
        raise ValueError(
            f"num_classes is {num_classes}, but generated shapes have 2 to {MAX_CLASSES} classes"
        )
    count = len(KINDS)
    return tuple(
        f"{TEXTURES[label // count]} {KINDS[label % count]}" for label in range(num_classes)
    )


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
