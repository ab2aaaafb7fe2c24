"""Masks as COCO writes them: polygons, and run lengths plain or compressed.

Run lengths count pixels down the columns, outside first. Polygons cover exactly the pixels that
pycocotools gives them, so that training sees the masks that evaluation scores.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]

_UPSAMPLING = 5  # pycocotools follows a polygon's edges on a grid five times finer than the pixels


def encode_counts(mask: Mask) -> list[int]:
    """Return a mask's run lengths."""
    flat = np.asarray(mask, dtype=bool).ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=False))
    return np.diff(changes, prepend=0, append=flat.size).tolist()


def decode_counts(counts: Sequence[int], height: int, width: int) -> Mask:
    """Return the mask of run lengths; raise `ValueError` unless they fill the image."""
    runs = np.asarray(counts, dtype=np.int64)
    if runs.ndim != 1 or (runs < 0).any() or runs.sum() != height * width:
        raise ValueError(f"run lengths do not add up to {height} x {width} pixels")
    inside = np.arange(len(runs)) % 2 == 1
    return np.repeat(inside, runs).reshape((height, width), order="F")


def parse_counts(text: str | bytes) -> list[int]:
    """Return the run lengths of COCO's compressed form; raise `ValueError` if it is damaged.

    Five bits a character, low ones first, the sixth saying that more follow; from the fourth
    number on, differences to the last but one.
    """
    codes = text.encode("ascii", "replace") if isinstance(text, str) else text
    counts: list[int] = []
    value = shift = 0
    for code in codes:
        bits = code - 48
        if not 0 <= bits < 64:
            raise ValueError(f"compressed run lengths contain {chr(code)!r}")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("compressed run lengths end in the middle of a number")
    return counts


def fill_polygons(polygons: Iterable[Sequence[float]], height: int, width: int) -> Mask:
    """Return the union of polygons, each given as x, y, x, y and so on."""
    mask = np.zeros((height, width), dtype=bool)
    for polygon in polygons:
        mask |= _fill_polygon(np.asarray(polygon, dtype=np.float64).reshape(-1, 2), height, width)
    return mask


def _fill_polygon(corners: NDArray[np.float64], height: int, width: int) -> Mask:
    u, v = _trace(np.trunc(_UPSAMPLING * corners + 0.5).astype(np.int64))
    steps = np.flatnonzero(u[1:] != u[:-1]) + 1
    # Where the outline crosses a pixel column's middle, and the first row below the crossing.
    column = (np.minimum(u[steps], u[steps - 1]) + 0.5) / _UPSAMPLING - 0.5
    row = (np.minimum(v[steps], v[steps - 1]) + 0.5) / _UPSAMPLING - 0.5
    middle = (column == np.floor(column)) & (column >= 0) & (column <= width - 1)
    column = column[middle].astype(np.int64)
    row = np.ceil(row[middle].clip(0, height)).astype(np.int64)
    # Going down the columns, every crossing switches between outside and inside.
    crossings = np.bincount(column * height + row, minlength=height * width + 1)
    flat = np.cumsum(crossings[: height * width]) % 2 == 1
    return flat.reshape((height, width), order="F")


def _trace(corners: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all grid points along a closed outline, edge by edge."""
    us, vs = [], []
    for start, end in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        length = np.abs(end - start)
        along = 0 if length[0] >= length[1] else 1
        backwards = start[along] > end[along]
        low, high = (end, start) if backwards else (start, end)
        steps = np.arange(length[along] + 1)
        slope = (high[1 - along] - low[1 - along]) / max(int(length[along]), 1)
        across = np.trunc(low[1 - along] + slope * steps + 0.5).astype(np.int64)
        points = (low[along] + steps, across)[:: 1 if along == 0 else -1]
        order = slice(None, None, -1 if backwards else 1)
        us.append(points[0][order])
        vs.append(points[1][order])
    return np.concatenate(us), np.concatenate(vs)
