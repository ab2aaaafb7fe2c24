"""Small files that claim to be large are refused by a sentence, before they are read."""

import io
import os
import struct
import tarfile
import tracemalloc
import zipfile
import zlib

import pytest
from PIL import Image

from ltm.data.datasets import open_dataset
from ltm.data.sources import find_images


def png(size=(4, 4), mode="L"):
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG")
    return buffer.getvalue()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def header(name, size):
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf()


def write_shard(path, label):
    with tarfile.open(path, "w") as tar:
        for name, content in (("a.png", png()), ("a.cls", label)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def refuses(source, message, read=False):
    """Expect a sentence that names the file and what it has."""

    def use():
        dataset = open_dataset(source, max_unreadable=0)
        return dataset[0] if read else dataset

    with pytest.raises(ValueError, match=message) as caught:
        use()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["00012345678901", "0" + 200 * "7"])
def test_class_folders_of_long_padded_numbers(tmp_path, name):
    write(tmp_path / name / "0.png", png())
    refuses(tmp_path, rf"folder {name[:40]}.* stands for class .*, but most_classes is 1000000")


def test_bar_codes_beside_a_name_are_names(tmp_path):
    for name in ("00012345678901", "other"):
        write(tmp_path / name / "0.png", png())
    assert open_dataset(tmp_path).class_names == ("00012345678901", "other")


def test_more_class_folders_than_allowed(tmp_path):
    for name in "abc":
        write(tmp_path / name / "0.png", png())
    refuses(f"{tmp_path}?most_classes=2", "has 3 class folders, but most_classes is 2")
    assert open_dataset(f"{tmp_path}?most_classes=3").num_classes == 3


@pytest.mark.parametrize("label", [b"100000000", b"9" * 32])
def test_a_label_beyond_all_classes(tmp_path, label):
    path = write_shard(tmp_path / "x.tar", label)
    refuses(path, rf"x.tar: a.cls names class {label.decode()}, but most_classes is 1000000")


def test_imagenet_21k_is_within_the_limits(tmp_path):
    assert open_dataset(write_shard(tmp_path / "x.tar", b"21840")).num_classes == 21_841


def test_a_list_of_too_many_classes(tmp_path):
    shard = write_shard(tmp_path / "x.tar", b"0")
    (tmp_path / "classes.txt").write_text("cat\ndog\nfox\n")
    refuses(f"{shard}?most_classes=2", r"classes.txt has 3 classes, but most_classes is 2")
    (tmp_path / "classes.txt").write_bytes(b"\xff\xfe")
    refuses(shard, r"classes.txt is not UTF-8 text")


def test_a_sparse_tar_that_claims_100_gb(tmp_path):
    path = write(
        tmp_path / "x.tar",
        header("a.cls", 1) + b"0".ljust(512, b"\0") + header("a.png", 100 * 10**9),
    )
    os.truncate(path, 100 * 10**9 + 4096)
    refuses(path, r"a.png has 100000000000 bytes, but most_bytes is 536870912")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_sparse_tar_whose_header_claims_100_gb(tmp_path, kind):
    member = tarfile.TarInfo("a")
    member.type, member.size = kind, 100 * 10**9
    path = write(tmp_path / "x.tar", member.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 100 * 10**9 + 4096)
    refuses(path, r"x.tar is not a readable tar file \(a header of 100000000000 bytes")


def test_an_archive_that_inflates_a_thousand_times(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.png", bytes(100 * 2**20))
    times = r"would inflate to 104857600, \d+ times as many, but most_inflation is 200"
    refuses(path, rf"x.zip has \d+ bytes and {times}")
    refuses(f"{path}?most_inflation=2000,most_bytes=1000", "a/0.png has 104857600 bytes", read=True)


def test_flat_pictures_may_inflate_a_thousand_times(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.ppm", b"P6 1000 1000 255\n" + bytes(3_000_000))
    assert open_dataset(path)[0][0].size == (1000, 1000)


def test_an_archive_that_lies_about_the_size(tmp_path):
    """What is inflated is what the directory says, not what comes out."""
    content = bytearray()
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(bytes(2**26)) + packer.flush()
    sizes = struct.pack("<III", zlib.crc32(bytes(1000)), len(packed), 1000)
    content += b"PK\3\4" + struct.pack("<5H", 20, 0, 8, 0, 0) + sizes + struct.pack("<HH", 7, 0)
    content += b"a/0.png" + packed
    start = len(content)
    content += b"PK\1\2" + struct.pack("<6H", 20, 20, 0, 8, 0, 0) + sizes
    content += struct.pack("<5H2I", 7, 0, 0, 0, 0, 0, 0) + b"a/0.png"
    end = struct.pack("<4H2IH", 0, 0, 1, 1, len(content) - start, start, 0)
    path = write(tmp_path / "x.zip", bytes(content) + b"PK\5\6" + end)
    tracemalloc.start()
    try:
        refuses(path, "a/0.png is not a readable image", read=True)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_packing_methods_that_inflate_without_bounds(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a/0.png", png())
    refuses(path, "a/0.png is compressed in an unusual way; use deflate or store", read=True)


def test_an_archive_of_endless_paths(tmp_path):
    for name in ("a/" * 30_000, "a" * 60_000 + "/"):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr(f"{name}0.png", b"")
        refuses(tmp_path / "x.zip", "x.zip (nests 30000 folders|has a folder whose name is)")


def test_a_small_png_of_169_megapixels(tmp_path):
    path = write(tmp_path / "a" / "0.png", png((13_000, 13_000), "1"))
    assert path.stat().st_size < 30_000
    refuses(tmp_path, "0.png has 169000000 pixels, but most_pixels is 134217728; if", read=True)


def parquet(path, images):
    pyarrow = pytest.importorskip("pyarrow")
    return write_column(path, pyarrow.array(images, pyarrow.large_binary()))


def write_column(path, images, **options):
    pyarrow = pytest.importorskip("pyarrow")
    file = pytest.importorskip("pyarrow.parquet")
    file.write_table(pyarrow.table({"image": images}), path, **options)
    return str(path)


def test_a_parquet_file_of_endless_rows(tmp_path):
    """10 million rows without an image took minutes, and gigabytes for their names."""
    path = parquet(tmp_path / "rows.parquet", [None] * 10**7)
    message = (
        r"rows\.parquet has \d+ bytes and would inflate to 5120000000, .* most_inflation is 200"
    )
    with pytest.raises(ValueError, match=message):
        next(find_images([path]))


def test_a_parquet_file_that_repeats_a_large_value(tmp_path):
    """A value that repeats is stored once: all rows of this file would be 20 GB."""
    pyarrow = pytest.importorskip("pyarrow")
    places, value = pyarrow.array([0] * 1280, pyarrow.int32()), pyarrow.array([bytes(2**24)])
    path = write_column(
        tmp_path / "same.parquet",
        pyarrow.DictionaryArray.from_arrays(places, value),
        dictionary_pagesize_limit=2**30,
        store_schema=False,  # or it is read as a dictionary again
    )
    images = list(find_images([path]))
    for image in (images[0], images[-1]):
        with pytest.raises(ValueError, match=r"same\.parquet has \d+ bytes and would inflate to"):
            image.open()


def test_a_large_picture_in_a_parquet_file(tmp_path):
    path = parquet(tmp_path / "large.parquet", [png((13_000, 13_000), "1")])
    with pytest.raises(ValueError, match=r"row 0 of .*large\.parquet has 169000000 pixels"):
        next(find_images([path])).open()


def test_a_picture_that_pillow_refuses_too(tmp_path):
    write(tmp_path / "a" / "0.pgm", b"P4 40000 40000\n")
    refuses(tmp_path, "0.pgm has 1600000000 pixels, but most_pixels is 134217728", read=True)


def test_pillow_follows_a_raised_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    write(tmp_path / "a" / "0.png", png((8, 8)))
    refuses(tmp_path, "could be decompression bomb", read=True)  # the process has its own limit
    image, _ = open_dataset(f"{tmp_path}?most_pixels=200000000")[0]
    assert image.size == (8, 8)


def test_a_folder_that_links_to_itself(tmp_path):
    for name in ("a", "b", "c"):
        write(tmp_path / "pictures" / name / "0.png", png())
        for other in ("x", "y", "z"):
            (tmp_path / "pictures" / name / other).symlink_to(tmp_path / "pictures")
    shared = write(tmp_path / "elsewhere" / "0.png", png()).parent
    (tmp_path / "pictures" / "d").symlink_to(shared)
    assert len(open_dataset(tmp_path / "pictures")) == 4


def test_a_pipe_among_the_pictures(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "0.png")
    refuses(tmp_path, "0.png is not a regular file", read=True)


def test_limits_are_written_behind_the_source(tmp_path):
    write(tmp_path / "a" / "0.png", png())
    for words in ("most_pixels=16", "most_pixels=16,most_bytes=1000"):
        assert open_dataset(f"{tmp_path}?{words}")[0][0].size == (4, 4)
    refuses(f"{tmp_path}?most_pixels=15", "has 16 pixels, but most_pixels is 15", read=True)
    refuses(f"{tmp_path}?most_bytes=15", r"has \d+ bytes, but most_bytes is 15", read=True)
    refuses(f"{tmp_path}?most_pixel=15", "data has no setting most_pixel; did you mean most_pixels")
    refuses(f"{tmp_path}?most_pixels=many", "must be a whole number")
    refuses(f"{tmp_path}?most_pixels=0", "must be at least 1")


def test_other_question_marks_are_part_of_the_name(tmp_path):
    write_shard(tmp_path / "x-1.tar", b"0")
    assert len(open_dataset(f"{tmp_path}/x-?.tar")) == 1
    folder = write(tmp_path / "photos?width=300" / "a" / "0.png", png()).parent.parent
    assert len(open_dataset(folder)) == 1
