"""Pixels: images as a network sees them, weights and groups painted over them, data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ltm.data.transforms import ImageSpec, evaluation_transform

Pixels = NDArray[np.uint8]
"""An image, height x width x 3."""

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


def prepare(images: Sequence[Image.Image], names: Sequence[str], spec: ImageSpec) -> Scenes:
    """Resize, crop and normalise images as in evaluation, and keep the pixels that remain."""
    transform = evaluation_transform(spec)
    bytes_ = torch.stack([transform(image) for image in images])
    mean, std = (255 * torch.tensor(v)[:, None, None] for v in (spec.mean, spec.std))
    pixels = tuple(image.permute(1, 2, 0).contiguous().numpy() for image in bytes_)
    return Scenes(names=tuple(names), pixels=pixels, inputs=(bytes_.float() - mean) / std)


def spread_cells(cells: NDArray, size: tuple[int, int]) -> NDArray:
    """Give every pixel the value of the cell that it lies in; sides need not divide."""
    rows = np.arange(size[0]) * cells.shape[0] // size[0]
    columns = np.arange(size[1]) * cells.shape[1] // size[1]
    return cells[rows][:, columns]


def weight_colours() -> ListedColormap:
    """From dark to bright; both ends of the map are cut, which would vanish on a picture."""
    return ListedColormap(colormaps["inferno"](np.linspace(0.2, 0.9, 256)), name="weights")


def paint_weights(pixels: Pixels, weights: NDArray[np.float32]) -> Pixels:
    """Colour the patches of one token by weight, over a faint grey image."""
    grey = pixels.mean(axis=2, keepdims=True)
    faint = np.repeat(255 - _FAINT * (255 - grey), 3, axis=2)
    largest = float(weights.max())
    if largest <= 0:
        return faint.astype(np.uint8)
    heat = spread_cells(weights / largest, pixels.shape[:2])[..., None]
    colours = weight_colours()(heat[..., 0])[..., :3] * 255
    opacity = np.where(heat > 0, 0.85, 0.0)
    return (faint * (1 - opacity) + colours * opacity).astype(np.uint8)


def paint_groups(pixels: Pixels, groups: NDArray[np.int64]) -> Pixels:
    """Paint patches that became one token in their mean colour, with a line around them.

    Patches that are still alone keep their pixels; dropped ones are blank.
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
    """Repeat pixels of small images until lines and boxes have room."""
    factor = max(1, -(-least // max(pixels.shape[:2])))
    return np.repeat(np.repeat(pixels, factor, axis=0), factor, axis=1)


def captioned(pictures: Sequence[Pixels], captions: Sequence[str], margin: int = 22) -> Image.Image:
    """Put pictures of one size side by side, a line of text above each."""
    height, width = pictures[0].shape[:2]
    gap = 8
    sheet = Image.new(
        "RGB", (len(pictures) * (width + gap) - gap, height + margin), (255, 255, 255)
    )
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
