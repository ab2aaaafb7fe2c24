"""What strangers upload: pictures are taken, everything else is refused with a sentence."""

from pathlib import Path

import pytest
from PIL import Image

from ltm.web.page import MAX_BYTES, SHOWN_SIDE, RefusedUploadError, read_picture


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    for content in (b"", b"some words", b"\x89PNG\r\n\x1a\nand nothing else"):
        path.write_bytes(content)
        with pytest.raises(RefusedUploadError, match="not a readable picture"):
            read_picture(path)


def test_a_format_with_rare_decoders_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    Image.new("RGB", (8, 8)).save(path, format="TGA")
    with pytest.raises(RefusedUploadError, match="not a readable picture"):
        read_picture(path)


def test_more_than_20_mb_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    Image.new("RGB", (8, 8)).save(path)
    with path.open("r+b") as file:
        file.truncate(MAX_BYTES + 2**20)
    with pytest.raises(RefusedUploadError, match="The file has 21 MB; at most 20 MB are accepted"):
        read_picture(path)


@pytest.mark.parametrize("side", [7200, 20000], ids=["large", "a bomb to Pillow too"])
def test_more_than_50_megapixels_are_refused_by_the_header_alone(tmp_path: Path, side: int) -> None:
    path = tmp_path / "vast.pbm"
    path.write_bytes(b"P4 %d %d\n" % (side, side))
    with pytest.raises(RefusedUploadError, match="megapixels"):
        read_picture(path)


def test_a_picture_is_turned_upright_and_made_smaller(tmp_path: Path) -> None:
    path = tmp_path / "phone.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    Image.new("RGB", (4000, 3000), "teal").save(path, exif=exif)
    picture = read_picture(path)
    assert picture.mode == "RGB"
    assert picture.size == (SHOWN_SIDE * 3 // 4, SHOWN_SIDE)


def test_transparency_and_palettes_are_fine(tmp_path: Path) -> None:
    for mode in ("RGBA", "P", "L", "1", "I;16"):
        path = tmp_path / f"{mode}.png"
        Image.new(mode, (20, 10)).save(path)
        assert read_picture(path).mode == "RGB"
