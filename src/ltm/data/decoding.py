"""The one reader of image files: upright, in RGB, within the limits.

Whatever reads images reads them here: data sets, prediction, reports, the page, detection.
"""

import io
import math
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ltm.data.limits import LimitError, Limits, read_file

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif"}
)

ARRAYS = frozenset({".npy"})
"""Files of 8-bit pixels, which tar shards may hold instead of images."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How to turn an image upright, by its EXIF orientation."""


class UnreadableImageError(ValueError):
    """An image that cannot be decoded: its name, and why."""


def read_image(path: str | Path, limits: Limits | None = None) -> Image.Image:
    """Read an image file."""
    limits = limits or Limits()
    return decode(read_file(Path(path), limits), str(path), limits)


def decode(
    data: bytes,
    name: str,
    limits: Limits | None = None,
    *,
    size: tuple[int, int] | None = None,
    formats: tuple[str, ...] | None = None,
    draft: int | None = None,
) -> Image.Image:
    """Decode an image to RGB, turned upright as its EXIF orientation says.

    Args:
        data: The file's content.
        name: The file's name, for errors.
        limits: What is refused by the header alone, before any pixel is decoded.
        size: Width and height that are known from annotations. If only the image as it is stored
            has this size, it is not turned.
        formats: Pillow's names of the formats to take; by default all that it decodes by itself.
        draft: A side in pixels that suffices; JPEGs much larger are decoded at a lower resolution.

    Raises:
        LimitError: The image has too many pixels.
        UnreadableImageError: It is damaged, or not an image.
    """
    limits = limits or Limits()
    _lift_pillows_limit(limits.most_pixels)
    try:
        with warnings.catch_warnings():
            # They are about the metadata of images that can be decoded.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=formats) as image:
                _check_pixels(name, image.width * image.height, limits)
                _refuse_programs(image)
                if draft is not None:
                    image.draft("RGB", (draft, draft))
                image.load()
                turn = _TURNS.get(_orientation(image))
                return _turned(to_rgb(image), turn, size)
    except LimitError:
        raise
    except Exception as error:  # decoders raise anything on damaged bytes
        if isinstance(error, Image.DecompressionBombError):  # Pillow's own limit
            _check_pixels(name, int("0" + "".join(re.findall(r"\d+", str(error))[:1])), limits)
        raise UnreadableImageError(f"{name} is not a readable image: {_sentence(error)}") from error


def decode_array(data: bytes | memoryview, name: str, limits: Limits | None = None) -> np.ndarray:
    """Decode a .npy file of 8-bit pixels, (height, width, 3) or (3, height, width), without a copy.

    The header is checked first, as it may claim any size. Nothing is unpickled.
    """
    try:
        shape, by_columns, dtype, start = _array_header(bytes(data[: 10 + _header_size(data)]))
    except Exception as error:  # numpy parses the header as Python
        raise UnreadableImageError(f"{name} is not a readable array: {_sentence(error)}") from error
    if dtype != np.uint8 or by_columns or len(shape) != 3 or min(shape) < 1 or 3 not in shape[::2]:
        raise UnreadableImageError(
            f"{name} is an array of {dtype} and shape {shape}; 8-bit pixels of shape "
            "(height, width, 3) or (3, height, width) are needed"
        )
    size = math.prod(shape)
    _check_pixels(name, size // 3, limits or Limits())
    if len(data) - start < size:
        raise UnreadableImageError(f"{name} is not a readable array: it is cut off")
    return np.frombuffer(data, np.uint8, size, start).reshape(shape)


def _header_size(data: bytes | memoryview) -> int:
    return int.from_bytes(data[8:10], "little")


@lru_cache(maxsize=64)
def _array_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, order, type and start of an array; the headers of a shard are mostly the same."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(
            f"version {version} of the format is not supported; save it with numpy.save"
        )
    return *np.lib.format.read_array_header_1_0(file), file.tell()


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB: 16-bit grey is scaled, not clipped, and transparency is dropped."""
    if image.mode == "RGB":
        image.load()  # most images are RGB already, and need no copy
        return image
    if image.mode.startswith("I"):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Scale 16-bit grey, a few rows at a time: floats of a large image would fill the memory."""
    scaled, rows = np.empty((image.height, image.width), np.uint8), 256
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height)))
        grey = np.asarray(part, dtype=np.float32) / 257.0
        scaled[top : top + rows] = grey.clip(0, 255).round().astype(np.uint8)
    return scaled


def _refuse_programs(image: Image.Image) -> None:
    if image.format == "EPS":
        raise ValueError("PostScript is refused, because Pillow would run Ghostscript on it")


def _check_pixels(name: str, pixels: int, limits: Limits) -> None:
    limits.check("most_pixels", pixels, f"{name} has {pixels} pixels")


def _lift_pillows_limit(most_pixels: int) -> None:
    """Raise Pillow's limit, one for the whole process, to what the user allows."""
    pillows = Image.MAX_IMAGE_PIXELS
    raised = most_pixels > Limits.most_pixels
    if raised and pillows is not None and most_pixels > 2 * pillows:
        Image.MAX_IMAGE_PIXELS = most_pixels


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - damaged metadata do not make the picture unreadable
        return 1


def _turned(
    image: Image.Image, turn: Image.Transpose | None, size: tuple[int, int] | None
) -> Image.Image:
    if turn is None:
        return image
    upright = image.transpose(turn)
    return upright if size in (None, upright.size) else image


def _sentence(error: BaseException) -> str:
    # Pillow ends with the buffer that it read from.
    text = str(error).partition("<_io.BytesIO")[0]
    return " ".join(text.split()) or type(error).__name__
