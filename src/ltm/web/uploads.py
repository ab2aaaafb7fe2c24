"""Pictures from strangers: what is no picture, or too large, is refused with a sentence."""

from __future__ import annotations

import warnings
from pathlib import Path

from PIL import Image, ImageOps

from ltm.data.images import to_rgb

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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The header alone is read here: a small file can claim any number of pixels.
            with Image.open(path, formats=_FORMATS) as image:
                _check_pixels(image)
                image.draft("RGB", (2 * SHOWN_SIDE, 2 * SHOWN_SIDE))
                upright = ImageOps.exif_transpose(to_rgb(image))
    except RefusedUploadError:
        raise
    except Image.DecompressionBombError as error:
        raise RefusedUploadError(f"The picture is too large: {_millions(_MAX_PIXELS)}.") from error
    except Exception as error:  # decoders raise anything on damaged bytes
        raise RefusedUploadError(
            "The file is no picture that can be read; JPEG, PNG, WebP, GIF, BMP and TIFF are taken."
        ) from error
    upright.thumbnail((SHOWN_SIDE, SHOWN_SIDE), Image.Resampling.LANCZOS)
    return upright


def _check_pixels(image: Image.Image) -> None:
    pixels = image.width * image.height
    if pixels > _MAX_PIXELS:
        raise RefusedUploadError(
            f"The picture has {pixels / 1e6:.0f} megapixels; at most {_millions(_MAX_PIXELS)}."
        )


def _millions(pixels: int) -> str:
    return f"{pixels // 1_000_000} megapixels are taken"
