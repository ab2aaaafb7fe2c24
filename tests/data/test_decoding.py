"""The one reader of images: upright, RGB, and errors of one sentence that name the file."""

import ast
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ltm
from ltm.data.datasets import open_dataset
from ltm.data.decoding import UnreadableImageError, decode, decode_array, read_image
from ltm.report.pictures import read_pictures


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def corners():
    """Paint a picture of which every turn is different."""
    pixels = np.zeros((16, 24, 3), dtype=np.uint8)
    pixels[:8, :12], pixels[:8, 12:], pixels[8:, :12] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    return Image.fromarray(pixels)


def tagged(orientation, kind="PNG"):
    """Return the picture as a camera that was turned stores it."""
    stored = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    picture = corners()
    exif = Image.Exif()
    exif[0x0112] = orientation
    if orientation in stored:
        picture = picture.transpose(stored[orientation])
    return encoded(picture, kind, exif=exif)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation, kind):
    image = decode(tagged(orientation, kind), "a.jpg")
    assert image.size == (24, 16)
    difference = np.asarray(image).astype(int) - np.asarray(corners())
    assert np.abs(difference).mean() < 16


def test_annotated_images_are_turned_only_to_their_size():
    data = tagged(6)
    assert decode(data, "a.png", size=(24, 16)).size == (24, 16)
    assert decode(data, "a.png", size=(16, 24)).size == (16, 24)  # annotated as it is stored


def test_data_and_pictures_of_reports_are_turned_upright(tmp_path):
    for orientation in (1, 6):
        (tmp_path / "class").mkdir(exist_ok=True)
        (tmp_path / "class" / f"{orientation}.png").write_bytes(tagged(orientation))
    data, pictures = open_dataset(tmp_path), read_pictures([tmp_path / "class"])
    for image in (data[0][0], data[1][0], *(picture for _, picture in pictures)):
        assert image.tobytes() == corners().tobytes()


def test_nothing_else_opens_images():
    def opens(path):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        return any(isinstance(n, ast.Attribute) and ast.unparse(n) == "Image.open" for n in nodes)

    found = [path.name for path in Path(ltm.__file__).parent.rglob("*.py") if opens(path)]
    assert found == ["decoding.py"]


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_other_orientations_mean_nothing(orientation):
    assert decode(tagged(orientation), "a.png").tobytes() == corners().tobytes()


def test_damaged_metadata_do_not_matter():
    data = encoded(corners(), "JPEG", exif=b"Exif\0\0MM\0*" + b"\xff" * 60)
    assert decode(data, "a.jpg").size == (24, 16)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled(kind):
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    image = decode(encoded(Image.fromarray(ramp), kind), "a.png")
    assert np.asarray(image)[..., 0].flatten().tolist() == list(range(256))


def test_cmyk_keeps_its_colours():
    data = encoded(Image.new("RGB", (8, 8), (200, 40, 90)).convert("CMYK"), "JPEG", quality=100)
    image = decode(data, "a.jpg")
    assert np.abs(np.asarray(image).astype(int) - (200, 40, 90)).max() < 4


def test_transparent_palettes_keep_their_colours():
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 200, 40, 90])
    for transparency in (1, bytes([255, 0])):
        image = decode(encoded(palette, transparency=transparency), "a.png")
        assert image.getpixel((0, 0)) == (200, 40, 90)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "PPM", "GIF"])
def test_damaged_files_are_named(tmp_path, kind):
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    path = tmp_path / "a.jpg"
    for content in (data[: len(data) // 3], data[:12], b"", b"some words"):
        path.write_bytes(content)
        with pytest.raises(
            UnreadableImageError, match=r"a\.jpg is not a readable image: "
        ) as caught:
            read_image(path)
        assert "\n" not in str(caught.value)
        assert "BytesIO" not in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_postscript_is_never_run():
    data = encoded(corners(), "EPS")
    with pytest.raises(UnreadableImageError, match="PostScript is refused"):
        decode(data, "a.png")


@pytest.mark.parametrize("shape", ["(30, -99, 3)", "(0, 32, 3)", "(32, 3)", "(99, 99, 3)"])
def test_the_shape_of_an_array_is_checked(shape):
    """A negative side was numpy's error, which does not name the file."""
    file = io.BytesIO()
    np.save(file, np.zeros((24, 32, 3), np.uint8))
    data = file.getvalue().replace(b"(24, 32, 3)", shape.encode())
    with pytest.raises(UnreadableImageError, match=r"^a\.npy is "):
        decode_array(data, "a.npy")
