import io
import tarfile

import pytest
from PIL import Image

from ltm.data.config import DataConfig
from ltm.data.datasets import open_dataset, open_splits
from ltm.data.images import (
    ImageDataset,
    NoLabelsError,
    UnreadableImagesError,
    UnreadableImageWarning,
)
from ltm.data.shards import expand_shards, open_shards


def png(value=0):
    buffer = io.BytesIO()
    Image.new("L", (4, 4), value).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def opened(paths, **options):
    found = open_shards(paths)
    return ImageDataset(found.files, found.labels, found.class_names, **options)


def values(items):
    """Identify images by their first pixel."""
    return [items[index][0].getpixel((0, 0))[0] for index in range(len(items))]


@pytest.fixture
def numbered(tmp_path):
    """Write shards of 7, 0, 5 and 8 images whose pixels count them from 0 to 19."""
    paths, number = [], 0
    for shard, count in enumerate((7, 0, 5, 8)):
        members = {}
        for value in range(number, number + count):
            members[f"sub/{value:03d}.png"] = png(value)
            members[f"sub/{value:03d}.cls"] = str(value % 3).encode()
            members[f"sub/{value:03d}.json"] = b"{}"
        number += count
        paths.append(write_tar(tmp_path / f"n-{shard:02d}.tar", members))
    return paths


def test_shards_are_read_in_order(shards, splits):
    dataset = opened(expand_shards(str(shards), "train"))
    assert dataset.class_names == splits[0].class_names
    names = [dataset.name(index).partition(", ")[2] for index in (9, 10, 20, 23)]
    assert names == ["image 9", "image 0", "image 0", "image 3"]
    assert len(dataset) == 24
    assert dataset.labels.tolist() == splits[0].labels.tolist()
    for index in range(24):
        image, label = dataset[index]
        expected, expected_label = splits[0][index]
        assert image.tobytes() == expected.tobytes()
        assert label == expected_label


def test_patterns(shards, tmp_path):
    expected = tuple(shards / f"train-{number:03d}.tar" for number in range(3))
    assert expand_shards(f"{shards}/train-{{000..002}}.tar", "val") == expected
    assert expand_shards(f"{shards}/{{split}}-{{000..002}}.tar", "train") == expected
    assert expand_shards(f"{shards}/train-*.tar", "train") == expected
    assert expand_shards(str(shards), "train") == expected
    assert expand_shards(str(shards), "val") == (shards / "val-000.tar",)
    assert len(expand_shards(str(shards), "other")) == 4
    assert len(expand_shards("a-{0..1}-{08..12}.tar", "val")) == 10


@pytest.mark.parametrize("names", [("n-train-0", "n-validation-0"), ("train-0", "val-0")])
def test_splits_are_told_by_a_word_of_the_name(numbered, tmp_path, names):
    for path, name in zip(numbered[::2], names, strict=True):
        path.rename(tmp_path / f"{name}.tar")
    (tmp_path / "n-01.tar").unlink()
    train, val = open_splits(DataConfig(source=str(tmp_path)))
    assert [path.stem for path in (*train.files.paths, *val.files.paths)] == list(names)


def test_no_shard_is_both_trained_and_evaluated_on(numbered, tmp_path):
    with pytest.raises(ValueError, match=r"n-00.tar is a shard of both train and val; nothing"):
        open_splits(DataConfig(source=str(tmp_path)))


@pytest.mark.parametrize("text", ["a\nb\nc\n", "a\nb\nc"])
def test_every_line_names_a_class(numbered, tmp_path, text):
    (tmp_path / "classes.txt").write_text(text)
    assert opened(numbered).class_names == ("a", "b", "c")


def test_every_label_needs_a_name(numbered, tmp_path):
    (tmp_path / "classes.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="names 2 classes, but labels go up to 2"):
        opened(numbered)


def test_views(numbered):
    dataset = opened(numbered)
    chosen = [dataset[index][0].getpixel((0, 0))[0] for index in (9, -1, 0)]
    assert chosen == [9, 19, 0]
    assert dataset.with_transform(lambda image: image.size)[3] == ((4, 4), 0)
    few = dataset.take(9)
    assert len(few) == len(few.labels) == 9
    assert sorted(few.labels.tolist()) == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert values(few) == sorted(values(few))
    assert dataset.name(8) == f"{numbered[2]}, image 1"
    with pytest.raises(IndexError):
        dataset[20]


def test_a_few_images_are_of_all_classes_as_from_folders(tmp_path):
    """Shards sorted by class, as tools write them."""
    members = {}
    for value in range(20):
        members |= {f"{value:02d}.png": png(value), f"{value:02d}.cls": str(value // 4).encode()}
        path = tmp_path / "folder" / str(value // 4) / f"{value:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(value))
    write_tar(tmp_path / "sorted-0.tar", members)
    shards, folder = open_dataset(f"{tmp_path}/*.tar"), open_dataset(tmp_path / "folder")
    assert shards.take(5).labels.tolist() == [0, 1, 2, 3, 4]
    for number in (1, 3, 5, 8, 20, 99):
        assert values(shards.take(number)) == values(folder.take(number))


def test_shards_that_no_split_tells_apart_are_unsplit(numbered, shards, tmp_path):
    assert open_dataset(f"{tmp_path}/n-*.tar", split="val").split == "all"
    assert open_dataset(shards, split="val").split == "val"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.png": png()}, "x.tar, image 0 has no .cls file"),
        ({"a.png": png(), "a.cls": b"1", "b.png": png()}, "x.tar, image 1 has no .cls file"),
        ({"a.cls": b"1"}, "a has .cls, but no image"),
        ({"a.png": png(), "a.cls": b"cat"}, "must hold a class index, not b'cat'"),
        ({}, "no images in 1 tar shards"),
        ({"a.png": png(), "a.cls": b"1" * 33}, "a.cls has 33 bytes, but must have at most 32"),
    ],
)
def test_malformed_shards_are_refused(tmp_path, members, message):
    path = write_tar(tmp_path / "x.tar", members)
    with pytest.raises(ValueError, match=message):
        opened([path])


@pytest.mark.parametrize("labels", [(), (1,)])
def test_images_without_labels_need_no_cls_files(tmp_path, labels):
    members = {f"{value}.png": png(value) for value in range(3)}
    members |= {f"{value}.cls": b"1" for value in labels}
    path = write_tar(tmp_path / "x.tar", dict(sorted(members.items())))
    dataset = open_dataset(path, labelled=False)
    assert (len(dataset), dataset.class_names, values(dataset)) == (3, (), [0, 1, 2])
    with pytest.raises(ValueError, match=r"image 0 has no \.cls") as raised:
        open_dataset(path)
    assert isinstance(raised.value, NoLabelsError) != bool(labels)


def test_a_shell_is_never_asked_for_shards(tmp_path):
    with pytest.raises(FileNotFoundError, match="1 of 1 shards are missing"):
        open_dataset(f"pipe:touch {tmp_path}/ran; cat x.tar")
    assert not (tmp_path / "ran").exists()


def test_missing_and_damaged_shards_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="1 of 1 shards are missing"):
        opened([tmp_path / "x.tar"])
    with pytest.raises(FileNotFoundError, match="no shards match"):
        opened(expand_shards(f"{tmp_path}/*.tar", "val"))
    (tmp_path / "x.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(ValueError, match="not a readable tar file"):
        opened([tmp_path / "x.tar"])


def test_a_shard_that_is_cut_off_is_refused_before_it_is_read(numbered):
    data = numbered[0].read_bytes()
    with tarfile.open(numbered[0]) as tar:
        cut = tar.getmembers()[3].offset_data + 2
    numbered[0].write_bytes(data[:cut])
    with pytest.raises(ValueError, match="not a readable tar file"):
        opened(numbered[:1])


def test_images_of_absurd_size_are_refused(numbered):
    with pytest.raises(ValueError, match=r"000.png has \d+ bytes, but most_bytes is 8; if"):
        open_dataset(f"{numbered[0]}?most_bytes=8")


def test_names_that_come_twice_are_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for _ in range(2):
            member = tarfile.TarInfo("a.cls")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"1"))
    with pytest.raises(ValueError, match=r"x.tar: a.cls: duplicate file name"):
        opened([tmp_path / "x.tar"])


def test_unreadable_images_are_replaced_by_the_next(tmp_path):
    contents = [png(0), b"damaged", b"damaged", png(3), b"damaged"]
    members = {}
    for number, data in enumerate(contents):
        members |= {f"{number}.png": data, f"{number}.cls": b"0"}
    path = write_tar(tmp_path / "x.tar", members)
    with pytest.warns(UnreadableImageWarning, match=r"x.tar, image [124]"):
        assert values(opened([path])) == [0, 3, 3, 3, 0]
    with (
        pytest.warns(UnreadableImageWarning),
        pytest.raises(UnreadableImagesError, match=r"2 unreadable .* is 1: .*image 1, .*image 2"),
    ):
        values(opened([path], max_unreadable=1))
