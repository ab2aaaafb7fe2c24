import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from ltm.data.classification import open_splits
from ltm.data.config import DataConfig
from ltm.data.images import UnreadableImagesError, UnreadableImageWarning
from ltm.data.shards import TarShards, expand_shards
from ltm.data.streaming import ShardStream, shuffled


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


def values(items):
    """Identify images by their first pixel."""
    return [image.getpixel((0, 0))[0] for image, _ in items]


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
    dataset = TarShards(expand_shards(str(shards), "train"))
    assert dataset.class_names == splits[0].class_names
    assert dataset.index.counts == (10, 10, 4)
    assert len(dataset) == 24
    assert dataset.labels.tolist() == splits[0].labels.tolist()
    for (image, label), (expected, expected_label) in zip(dataset, splits[0], strict=False):
        assert image.tobytes() == expected.tobytes()
        assert label == expected_label
    assert len(list(dataset)) == 24


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
    assert [path.stem for path in (*train.paths, *val.paths)] == list(names)


def test_no_shard_is_both_trained_and_evaluated_on(numbered, tmp_path):
    with pytest.raises(ValueError, match=r"n-00.tar is a shard of both train and val; nothing"):
        open_splits(DataConfig(source=str(tmp_path)))


@pytest.mark.parametrize("text", ["a\nb\nc\n", "a\nb\nc"])
def test_every_line_names_a_class(numbered, tmp_path, text):
    (tmp_path / "classes.txt").write_text(text)
    assert TarShards(numbered).class_names == ("a", "b", "c")


def test_counts_beside_the_shards_save_reading_them(numbered, tmp_path):
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    (tmp_path / "sizes.json").write_text(json.dumps({path.name: 9 for path in numbered}))
    assert len(TarShards(numbered)) == 36
    (tmp_path / "classes.txt").write_text("a\nb\n")
    (tmp_path / "sizes.json").unlink()
    with pytest.raises(ValueError, match="names 2 classes, but labels go up to 2"):
        TarShards(numbered)


def test_views(numbered):
    dataset = TarShards(numbered)
    assert values([dataset[9], dataset[-1], dataset[0]]) == [9, 19, 0]
    assert dataset.with_transform(lambda image: image.size)[3] == ((4, 4), 0)
    few = dataset.take(9)
    assert len(few) == len(few.labels) == 9
    assert values(few) == list(range(9))
    assert dataset.name(8) == f"{numbered[2]}, image 1"
    with pytest.raises(IndexError):
        dataset[20]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.png": png()}, "a has no .cls"),
        ({"a.cls": b"1"}, "a has .cls, but no image"),
        ({"a.png": png(), "a.cls": b"cat"}, "must hold a class index, not b'cat'"),
        ({}, "no images in 1 tar shards"),
    ],
)
def test_malformed_shards_are_refused(tmp_path, members, message):
    path = write_tar(tmp_path / "x.tar", members)
    with pytest.raises(ValueError, match=message):
        TarShards([path])


def test_missing_and_damaged_shards_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="1 of 1 tar shards are missing"):
        TarShards([tmp_path / "x.tar"])
    with pytest.raises(FileNotFoundError, match="no tar shards match"):
        TarShards(expand_shards(f"{tmp_path}/*.tar", "val"))
    (tmp_path / "x.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(ValueError, match="no readable tar file"):
        TarShards([tmp_path / "x.tar"])


def test_unreadable_images_are_replaced_within_the_stream(tmp_path):
    contents = [png(0), b"damaged", b"damaged", png(3), b"damaged"]
    members = {}
    for number, data in enumerate(contents):
        members |= {f"{number}.png": data, f"{number}.cls": b"0"}
    path = write_tar(tmp_path / "x.tar", members)
    with pytest.warns(UnreadableImageWarning, match=r"x.tar, image [124]"):
        assert values(TarShards([path])) == [0, 3, 3, 3, 3]
    with (
        pytest.warns(UnreadableImageWarning),
        pytest.raises(UnreadableImagesError, match=r"2 unreadable .* is 1: .*image 1, .*image 2"),
    ):
        list(TarShards([path], max_unreadable=1))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_reads_every_image_once(numbered, world_size):
    streams = [
        ShardStream(
            TarShards(numbered), batch_size=4, training=False, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    seen = [value for stream in streams for value in values(stream)]
    assert sorted(seen) == list(range(20))
    assert sum(len(stream) for stream in streams) == 20


def test_training_shares_are_even_disjoint_and_new_each_epoch(numbered):
    streams = [
        ShardStream(TarShards(numbered), batch_size=3, training=True, rank=rank, world_size=3)
        for rank in range(3)
    ]
    epochs = []
    for epoch in (0, 1, 0):
        for stream in streams:
            stream.set_epoch(epoch)
        epochs.append([values(stream) for stream in streams])
    assert [len(share) for share in epochs[0]] == [6, 6, 6]
    assert len({value for share in epochs[0] for value in share}) == 18
    assert epochs[0] == epochs[2] != epochs[1]


def test_workers_cut_a_share_at_whole_batches(numbered):
    stream = ShardStream(TarShards(numbered), batch_size=3, training=False)
    stretches = [stream._stretch(number, 4) for number in range(4)]
    assert stretches == [(0, 3), (3, 9), (9, 15), (15, 20)]


def test_a_shuffle_buffer_loses_nothing():
    rng = np.random.default_rng(0)
    mixed = list(shuffled(iter(range(100)), 10, rng))
    assert sorted(mixed) == list(range(100))
    assert mixed != list(range(100))
    assert max(place - item for place, item in enumerate(mixed)) > 10  # some wait long
    assert all(item - place <= 10 for place, item in enumerate(mixed))  # none comes early
    assert list(shuffled(iter(range(5)), 1, rng)) == list(range(5))
