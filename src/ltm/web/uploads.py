"""Pictures from strangers: what is no picture, or too large, is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from ltm.data.decoding import decode
from ltm.data.limits import LimitError, Limits

MAX_BYTES = 20 * 2**20
_MAX_PIXELS = 50_000_000
SHOWN_SIDE = 768
"""Larger pictures are made smaller at once: networks see less anyway."""

# What people take pictures with; Pillow's other decoders are rarely used and rarely tested.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


class RefusedUploadError(ValueError):
    """An upload that is not shown, and why."""


def read_picture(path: str | Path) -> Image.Image:
    """A picture in RGB, upright, of moderate size; anything else is a `RefusedUploadError`."""
    path = Path(path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RefusedUploadError(f"The file has {size / 2**20:.0f} MB; at most 20 MB are taken.")
    limits = Limits(most_pixels=_MAX_PIXELS)
    try:
        upright = decode(
            path.read_bytes(), path.name, limits, formats=_FORMATS, draft=2 * SHOWN_SIDE
        )
    except LimitError as error:
        raise RefusedUploadError(
            f"The picture is too large; at most {_MAX_PIXELS // 1_000_000} megapixels are taken."
        ) from error
    except ValueError as error:
        raise RefusedUploadError(
            "The file is no picture that can be read; JPEG, PNG, WebP, GIF, BMP and TIFF are taken."
        ) from error
    upright.thumbnail((SHOWN_SIDE, SHOWN_SIDE), Image.Resampling.LANCZOS)
    return upright
