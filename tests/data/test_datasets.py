import io
import pickle
import shutil
import sys
import zipfile
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from ltm.data.config import DataConfig
from ltm.data.datasets import open_dataset, open_splits
from ltm.data.decoding import decode
from ltm.data.images import (
    ImageDataset,
    NoLabelsError,
    UnreadableImagesError,
    UnreadableImageWarning,
)
from ltm.data.shapes import ShapesClassification
from ltm.data.shards import ShardImages


def save(path, colour=(10, 20, 30), mode="RGB", size=(6, 5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def items(dataset):
    return [dataset[index] for index in range(len(dataset))]


def first_pixel(dataset, index):
    return dataset[index][0].getpixel((0, 0))


@pytest.fixture
def numbered(tmp_path):
    """Write three classes of four images each; the green channel counts the images."""
    for label, name in enumerate("abc"):
        for number in range(4):
            save(tmp_path / "data" / name / f"{number}.png", (label, number, 0))
    return tmp_path / "data"


def test_folder_and_archive_hold_the_same(folder, archive, splits):
    for split, generated in zip(("train", "val"), splits, strict=True):
        files, members = (open_dataset(source, split=split) for source in (folder, archive))
        assert files.class_names == members.class_names == tuple(sorted(generated.class_names))
        assert len(files) == len(members) == len(generated)
        assert (files.labels == members.labels).all()
        assert files.split == split
        for index in range(len(files)):
            assert files[index][0].tobytes() == members[index][0].tobytes()
            assert files[index][1] == files.labels[index]
        label_of = {image.tobytes(): label for image, label in items(generated)}
        for image, label in items(files):
            original = label_of[image.tobytes()]
            assert files.class_names[label] == generated.class_names[original]


def test_flat_folders_are_every_split_or_held_out(numbered):
    assert len(open_dataset(numbered, split="val")) == 12
    assert open_dataset(numbered, split="train").split == "all"
    train, val = (
        open_dataset(numbered, split=split, holdout_ratio=0.25) for split in ("train", "val")
    )
    assert np.bincount(train.labels).tolist() == [3, 3, 3]
    assert np.bincount(val.labels).tolist() == [1, 1, 1]
    names = {dataset.name(i) for dataset in (train, val) for i in range(len(dataset))}
    assert len(names) == 12
    with pytest.raises(ValueError, match="choose from train, val"):
        open_dataset(numbered, split="test", holdout_ratio=0.25)


@pytest.mark.parametrize("packed", [False, True])
def test_images_without_labels_need_no_class_folders(tmp_path, packed):
    names = ["a.png", "b.png", "more/c.png"]
    for name in names:
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name)
    source = tmp_path / "photos"
    if packed:
        shutil.make_archive(str(source), "zip", tmp_path, "photos")
        source = source.with_suffix(".zip")
    dataset = open_dataset(source, labelled=False)
    assert len(dataset) == 3
    assert dataset.class_names == ()
    assert sorted(dataset.name(index)[-5:] for index in range(3)) == ["a.png", "b.png", "c.png"]
    if not packed:
        (tmp_path / "photos" / "more" / "c.png").unlink()
        (tmp_path / "photos" / "more").rmdir()
        with pytest.raises(ValueError, match="no class folders"):
            open_dataset(source)


def test_training_opens_both_splits(numbered, folder):
    held_out = open_splits(DataConfig(source=str(numbered), holdout_ratio=0.5))
    assert (len(held_out.train), len(held_out.val)) == (6, 6)
    given = open_splits(DataConfig(source=str(folder), holdout_ratio=0.5))
    assert (len(given.train), len(given.val)) == (24, 10)


def test_a_wrapping_folder_and_foreign_files_are_tolerated(tmp_path):
    path = tmp_path / "wrapped.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in ("train/a/0.png", "train/b/1.png", "val/a/2.png"):
            buffer = io.BytesIO()
            Image.new("RGB", (4, 4)).save(buffer, "PNG")
            target.writestr(f"top/inner/{name}", buffer.getvalue())
        target.writestr("__MACOSX/top/inner/train/a/._0.png", b"no image")
        target.writestr("top/inner/train/a/notes.txt", b"no image")
        target.writestr("top/inner/train/.cache/x.png", b"no image")
    train, val = (open_dataset(path, split=split) for split in ("train", "val"))
    assert train.class_names == val.class_names == ("a", "b")
    assert (len(train), len(val)) == (2, 1)
    assert train[1][1] == 1


def test_validation_labels_follow_the_training_classes(tmp_path):
    for name in "abc":
        save(tmp_path / "train" / name / "0.png")
    save(tmp_path / "validation" / "c" / "0.png")
    val = open_dataset(tmp_path, split="val")
    assert val.class_names == ("a", "b", "c")
    assert val[0][1] == 2
    save(tmp_path / "validation" / "d" / "0.png")
    with pytest.raises(ValueError, match="training images lack: d"):
        open_dataset(tmp_path, split="val")


def test_a_class_may_be_named_like_a_split(tmp_path):
    for name in ("train", "plane"):
        save(tmp_path / name / "0.png")
    assert open_dataset(tmp_path).class_names == ("plane", "train")


@pytest.mark.parametrize(
    ("folders", "labels", "num_classes"),
    [
        (["0000", "0001", "0002"], [0, 1, 2], 3),
        (["0003", "0010"], [3, 10], 11),  # part of a numbered set keeps its indices
        ([str(n) for n in range(11)], list(range(11)), 11),  # and 10 follows 9
        (["1990", "2005"], [0, 1], 2),  # years are names
        (["b", "a", "10"], [0, 1, 2], 3),
    ],
)
def test_numbered_folders(tmp_path, folders, labels, num_classes):
    for name in folders:
        save(tmp_path / name / "0.png")
    dataset = open_dataset(tmp_path)
    assert dataset.labels.tolist() == labels
    assert dataset.num_classes == num_classes
    assert all(dataset.class_names[label] in folders for label in labels)


def test_bad_sources_are_refused_in_a_sentence(tmp_path, folder):
    def refuses(source, message, kind: type[Exception] = ValueError, **options):
        with pytest.raises(kind, match=message) as caught:
            open_dataset(source, **options)
        assert "\n" not in str(caught.value)

    refuses(tmp_path / "nowhere", "no data at .*nowhere; give a folder", FileNotFoundError)
    refuses(tmp_path / "no.zip", "no data at", FileNotFoundError)
    refuses(folder, "no split 'test'; choose from train, val", split="test")
    bare = tmp_path / "bare"
    bare.mkdir()
    refuses(bare, "no class folders; put the images")
    save(bare / "image.png")
    refuses(bare, "no class folders; put the images")
    (bare / "empty").mkdir()
    refuses(bare, "class folders but no images")
    save(bare / "full" / "image.png")
    refuses(bare, "without images: empty; remove them")
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"no archive")
    refuses(broken, "not a readable .zip archive")


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA", "I;16", "F"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    suffix = ".tif" if mode in ("CMYK", "F") else ".png"
    path = tmp_path / "a" / f"image{suffix}"
    grey = Image.new("L", (6, 5), 153)  # a colour of the web palette
    path.parent.mkdir()
    if mode == "I;16":
        Image.fromarray(np.full((5, 6), 153 * 257, dtype=np.uint16)).save(path)
    else:
        grey.convert("RGB" if mode in ("P", "RGBA", "CMYK") else "L").convert(mode).save(path)
    image, _ = open_dataset(tmp_path)[0]
    assert image.mode == "RGB"
    if mode != "1":
        assert np.abs(np.asarray(image).astype(int) - 153).max() <= 2


def test_palettes_with_transparency_do_not_warn():
    buffer = io.BytesIO()
    Image.new("P", (4, 4)).save(buffer, "PNG", transparency=bytes([0, 255]))
    assert decode(buffer.getvalue(), "a.png").mode == "RGB"


def test_unreadable_images_are_replaced_by_the_next(numbered):
    (numbered / "a" / "1.png").write_bytes(b"no image")
    data = (numbered / "a" / "2.png").read_bytes()
    (numbered / "a" / "2.png").write_bytes(data[: len(data) // 2])
    dataset = open_dataset(numbered)
    with pytest.warns(UnreadableImageWarning) as caught:
        assert first_pixel(dataset, 1) == (0, 3, 0)
    for number, warning in zip((1, 2), caught, strict=True):
        assert str(numbered / "a" / f"{number}.png") in str(warning.message)
    assert first_pixel(dataset, 2) == (0, 3, 0)  # and they are not reported again
    assert first_pixel(dataset, 0) == (0, 0, 0)
    assert isinstance(dataset, ImageDataset)
    assert len(dataset.unreadable) == 2


def test_the_last_image_is_replaced_by_the_first(numbered):
    (numbered / "c" / "3.png").write_bytes(b"")
    dataset = open_dataset(numbered)
    with pytest.warns(UnreadableImageWarning, match="3.png"):
        image, label = dataset[11]
    assert (image.getpixel((0, 0)), label) == ((0, 0, 0), 0)


def test_too_many_unreadable_images_stop_the_run(numbered):
    for number in range(3):
        (numbered / "b" / f"{number}.png").write_bytes(b"no image")
    dataset = open_dataset(numbered, max_unreadable=2)
    with pytest.warns(UnreadableImageWarning), pytest.raises(UnreadableImagesError) as caught:
        dataset[4]
    assert "3 unreadable images, max_unreadable is 2" in str(caught.value)
    assert all(str(numbered / "b" / f"{number}.png") in str(caught.value) for number in range(3))


def test_nothing_readable_is_an_error_too(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(b"no image")
    dataset = open_dataset(tmp_path)
    with (
        pytest.warns(UnreadableImageWarning),
        pytest.raises(UnreadableImagesError, match="none of 1 images"),
    ):
        dataset[0]


def test_damage_inside_an_archive_is_noticed(archive, tmp_path):
    data = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as whole:
        member = whole.infolist()[0]
    data[member.header_offset + 60 + len(member.filename)] ^= 0xFF
    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(data)
    dataset = open_dataset(damaged, split="train")
    index = next(i for i in range(len(dataset)) if dataset.name(i).endswith(member.filename))
    with pytest.warns(UnreadableImageWarning, match="checksum"):
        dataset[index]


def test_archives_survive_pickling(archive):
    dataset = open_dataset(archive, split="val")
    again = pickle.loads(pickle.dumps(dataset))
    assert again[3][0].tobytes() == dataset[3][0].tobytes()


def test_views(numbered):
    dataset = open_dataset(numbered)
    small = dataset.take(3)
    assert small.labels.tolist() == [0, 1, 2]
    assert len(dataset.take(99)) == len(dataset) == 12
    assert small.with_transform(lambda image: image.size)[1] == ((6, 5), 1)
    assert dataset[-1][1] == 2
    with pytest.raises(IndexError):
        dataset[12]
    with pytest.raises(ValueError, match="num_images is 0"):
        dataset.take(0)


def test_generated_shapes_are_the_default():
    dataset = open_dataset(split="train")
    assert isinstance(dataset, ShapesClassification)
    assert (len(dataset), dataset.num_classes) == (4000, 10)
    chosen = open_dataset("shapes:classes=5,size=32,val_images=7,seed=2", split="val")
    assert (len(chosen), chosen.num_classes, chosen[0][0].size) == (7, 5, (32, 32))


def test_shards_come_through_the_same_door(shards):
    dataset = open_dataset(shards, split="train")
    assert isinstance(dataset.files, ShardImages)
    assert len(dataset) == 24


def test_hugging_face_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        open_dataset("hf:cifar10")


class _Rows:
    """Stand in for a Hugging Face data set: rows by number, columns by name."""

    class Image: ...

    class ClassLabel:
        names = ("cat", "dog")

    features = {"id": object(), "picture": Image(), "kind": ClassLabel()}  # noqa: RUF012

    def __len__(self):
        return 3

    def __getitem__(self, key):
        if key == "kind":
            return [0, 1, 1]
        buffer = io.BytesIO()
        Image.new("L", (4, 4), int(key)).save(buffer, "PNG")
        return {"picture": {"bytes": buffer.getvalue(), "path": None}, "kind": 0}

    def cast_column(self, column, feature):
        assert (column, feature) == ("picture", "undecoded")
        return self


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch):
    def fail(*_):
        raise ConnectionError("no route to the hub\nand more")

    module = ModuleType("datasets")
    vars(module).update(get_dataset_split_names=fail)
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ValueError, match=r"hf:cifar10 cannot be opened \(no route to the hub\):"):
        open_dataset("hf:cifar10")


def test_hugging_face_where_it_is_installed(monkeypatch):
    module = ModuleType("datasets")
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return _Rows()

    vars(module).update(
        load_dataset=load_dataset,
        get_dataset_split_names=lambda name, config: ["train", "validation"],
        Image=lambda decode: "decoded" if decode else "undecoded",
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    dataset = open_dataset("hf:pets:small", split="val")
    assert asked == [("pets", "small", "validation")]
    assert isinstance(dataset, ImageDataset)
    assert (dataset.class_names, dataset.labels.tolist()) == (("cat", "dog"), [0, 1, 1])
    assert first_pixel(dataset, 2) == (2, 2, 2)
    with pytest.raises(ValueError, match="no split 'test'; choose from train, validation"):
        open_dataset("hf:pets", split="test")
    monkeypatch.setattr(_Rows, "features", {"id": object(), "picture": _Rows.Image()})
    unlabelled = open_dataset("hf:pets", labelled=False)
    assert (unlabelled.class_names, first_pixel(unlabelled, 2)) == ((), (2, 2, 2))
    with pytest.raises(NoLabelsError, match="no ClassLabel column among id, picture"):
        open_dataset("hf:pets")


def test_labels_must_match_the_images(folder):
    dataset = open_dataset(folder).select([3, 1])
    labels = dataset.labels.tolist()
    assert dataset.with_labels([7, 8]).labels.tolist() == [7, 8]
    assert dataset.labels.tolist() == labels
    with pytest.raises(ValueError, match="2 images have 1 labels"):
        dataset.with_labels([7])
    with pytest.raises(ValueError, match="0 images have 2 labels"):
        ImageDataset(_NoImages(), np.zeros(2), ("a",))


class _NoImages:
    def __len__(self):
        return 0

    def name(self, index):
        return ""

    def read(self, index):
        raise NotImplementedError


@pytest.mark.real
def test_imagenet_archive(real_data):
    dataset = open_dataset(real_data / "imagenet-val.zip", split="val")
    assert (len(dataset), dataset.num_classes) == (2000, 1000)
    assert np.bincount(dataset.labels).tolist() == [2] * 1000
    image, label = dataset[1999]
    assert (image.size, image.mode, label) == ((256, 256), "RGB", 999)


@pytest.mark.real
def test_tiny_imagenet_archive(real_data):
    train, val = open_splits(DataConfig(source=str(real_data / "tiny-imagenet.zip")))
    assert (len(train), len(val), train.num_classes) == (20_000, 5_000, 200)
    sample = val.take(200)
    assert sorted(sample.labels.tolist()) == list(range(200))
    assert {sample[index][0].mode for index in range(200)} == {"RGB"}
