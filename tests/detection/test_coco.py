import json
import shutil
from copy import copy

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from ltm.data.images import UnreadableImageWarning
from ltm.data.loading import build_loader
from ltm.data.sampling import random_numbers_of
from ltm.data.shapes import ShapesDetection
from ltm.detection.coco import (
    CocoDetection,
    collate_detection,
    detection_transforms,
    open_detection,
)

# Of pycocotools under NumPy 2.
COPY = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


@pytest.fixture
def odd_data(tmp_path):
    """Write two images, one without objects, and annotations with every oddity."""
    for name, size in (("a.png", (20, 10)), ("b.png", (6, 6))):
        Image.new("RGB", size, (200, 100, 50)).save(tmp_path / name)
    square = [[2, 2, 6, 2, 6, 6, 2, 6]]
    runs = {"size": [10, 20], "counts": [0, 30, 170]}
    boxes = [
        (1, 90, [2, 2, 4, 4], 0, square),
        (2, 3, [-5, -5, 10, 10], 0, square),  # partly outside
        (3, 3, [15, 5, 50, 50], 0, square),
        (4, 3, [30, 5, 5, 5], 0, square),  # wholly outside
        (5, 3, [5, 5, 0, 3], 0, square),  # no width
        (6, 3, [5, 5, -2, 3], 0, square),
        (7, 90, [0, 0, 3, 10], 1, runs),
    ]
    names = ("id", "category_id", "bbox", "iscrowd", "segmentation")
    annotations = [{**dict(zip(names, box, strict=True)), "image_id": 5} for box in boxes]
    data = {
        "images": [
            {"id": 5, "file_name": "a.png", "width": 20, "height": 10},
            {"id": 2, "file_name": "b.png", "width": 6, "height": 6},
        ],
        "categories": [{"id": 90, "name": "dog"}, {"id": 3, "name": "cat"}],
        "annotations": annotations,
    }
    (tmp_path / "instances.json").write_text(json.dumps(data))
    return tmp_path


def test_odd_boxes_and_categories(odd_data):
    dataset = open_detection(odd_data)
    assert (dataset.class_names, dataset.category_ids) == (("cat", "dog"), (3, 90))
    image, target = dataset[0]
    assert isinstance(image, tv_tensors.Image)
    assert image.shape == (3, 10, 20)
    assert target["boxes"].tolist() == [[2, 2, 6, 6], [0, 0, 5, 5], [15, 5, 20, 10], [0, 0, 3, 10]]
    assert target["labels"].tolist() == [2, 1, 1, 2]
    assert [dataset.category_ids[label - 1] for label in target["labels"]] == [90, 3, 3, 90]
    assert target["iscrowd"].tolist() == [0, 0, 0, 1]
    assert target["image_id"].item() == 5
    assert target["orig_size"].tolist() == [10, 20]
    assert target["masks"].shape == (4, 10, 20)
    assert target["masks"][0, 2:6, 2:6].all()
    assert target["masks"][0].sum() == 16
    assert target["masks"][3, :, :3].all()
    assert target["masks"][3].sum() == 30


def test_images_without_objects(odd_data):
    _, target = open_detection(odd_data)[1]
    assert target["boxes"].shape == (0, 4)
    assert target["masks"].shape == (0, 6, 6)
    assert target["labels"].dtype == torch.int64
    for training in (False, True):
        transforms = detection_transforms(training, 32)
        image, target = open_detection(odd_data, transforms=transforms)[1]
        assert image.shape == (3, 32, 32)
        assert target["boxes"].shape == (0, 4)
        assert target["masks"].shape == (0, 32, 32)


def test_crowds_and_masks_can_be_left_out(odd_data):
    _, target = open_detection(odd_data, crowd=False, masks=False)[0]
    assert target["labels"].tolist() == [2, 1, 1]
    assert "masks" not in target


def test_generated_shapes_survive_the_round_trip(coco_folder, scenes, tmp_path):
    zipped = shutil.make_archive(str(tmp_path / "coco"), "zip", coco_folder)
    for source in (coco_folder, zipped):
        dataset = open_detection(source)
        assert isinstance(dataset, CocoDetection)
        assert len(dataset) == len(scenes)
        assert dataset.class_names == scenes.class_names
        for index in range(len(scenes)):
            (image, target), (expected, wanted) = dataset[index], scenes[index]
            assert torch.equal(image, expected)
            assert set(target) == set(wanted)
            assert all(torch.equal(target[name], wanted[name]) for name in target)
        assert dataset.coco_dict()["annotations"] == scenes.coco_dict()["annotations"]
        assert dataset.image_ids == scenes.image_ids


@pytest.mark.filterwarnings(COPY)
def test_evaluators_read_the_annotations(scenes):
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    truth = coco.COCO()
    truth.dataset = scenes.coco_dict()
    truth.createIndex()
    for index in range(len(scenes)):
        masks = [truth.annToMask(item) for item in truth.imgToAnns[index]]
        expected = scenes[index][1]["masks"].numpy()
        assert len(masks) == len(expected)
        assert all((mask == other).all() for mask, other in zip(masks, expected, strict=True))


def test_cocos_own_layout(coco_folder, tmp_path):
    (tmp_path / "annotations").mkdir()
    shutil.copytree(coco_folder / "images", tmp_path / "val2017")
    names = tmp_path / "annotations" / "instances_val2017.json"
    shutil.copy(coco_folder / "instances.json", names)
    assert len(open_detection(tmp_path, split="val")) == 8
    assert len(open_detection(tmp_path, split="train", annotations=names)) == 8
    with pytest.raises(FileNotFoundError, match=r"none of annotations/instances_train2017.json"):
        open_detection(tmp_path, split="train")
    with pytest.raises(FileNotFoundError, match=r"none of labels\.json; name the annotation file"):
        open_detection(tmp_path, annotations="labels.json")


@pytest.mark.parametrize(
    ("folders", "file_name", "chosen"),
    [
        (("train/images", "val/images"), "1.png", "val/images"),
        (("train2017", "val2017"), "1.png", "val2017"),
        (("a", "b"), "b/1.png", "b"),
        (("a/b", "b"), "b/1.png", "b"),
        (("a", "b"), "1.png", None),
        (("val/a", "val/b"), "1.png", None),
    ],
)
def test_an_image_is_that_of_its_split(tmp_path, folders, file_name, chosen):
    for shade, folder in enumerate(folders):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (4, 4), (shade, 0, 0)).save(tmp_path / folder / "1.png")
    image = {"id": 1, "file_name": file_name, "width": 4, "height": 4}
    data = {"images": [image], "categories": [], "annotations": []}
    (tmp_path / "instances.json").write_text(json.dumps(data))
    if chosen is None:
        with pytest.raises(ValueError, match=r"could be 1.png, the file_name of image 1"):
            open_detection(tmp_path, split="val")
    else:
        picture, _ = open_detection(tmp_path, split="val")[0]
        assert picture.max().item() == folders.index(chosen)


def test_bad_sources_are_refused(odd_data, tmp_path):
    with pytest.raises(FileNotFoundError, match="no data at"):
        open_detection(tmp_path / "nowhere")
    (odd_data / "b.png").rename(odd_data / "c.png")
    with pytest.raises(FileNotFoundError, match=r"lacks b.png, the file_name of image 2"):
        open_detection(odd_data)
    (odd_data / "c.png").rename(odd_data / "b.png")
    Image.new("RGB", (9, 9)).save(odd_data / "b.png")
    with pytest.raises(ValueError, match=r"image 2: width and height are 6 x 6, but .* 9 x 9"):
        open_detection(odd_data)[1]
    (odd_data / "instances.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        open_detection(odd_data)


@pytest.mark.parametrize("annotated", [(20, 10), (10, 20)], ids=["as stored", "upright"])
def test_images_are_upright_where_they_are_annotated_so(odd_data, annotated):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.new("RGB", (20, 10), (0, 0, 0))
    picture.paste((255, 0, 0), (0, 0, 10, 5))
    picture.save(odd_data / "b.png", exif=exif)
    path = odd_data / "instances.json"
    data = json.loads(path.read_text())
    data["images"][1] |= {"width": annotated[0], "height": annotated[1]}
    path.write_text(json.dumps(data))
    image, _ = open_detection(odd_data)[1]
    assert image.shape == (3, annotated[1], annotated[0])
    left_above, right_above = image[0, 0, 0], image[0, 0, -1]
    assert (left_above, right_above) == ((255, 0) if annotated == (20, 10) else (0, 255))


@pytest.mark.parametrize("text", [b"[" * 200_000, b"\xff\xfe{", b'{"images": NaN', b""])
def test_what_is_no_json_is_named(odd_data, text):
    (odd_data / "instances.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"instances\.json is no JSON: "):
        open_detection(odd_data)


def test_limits_are_written_behind_the_source(odd_data):
    assert len(open_detection(f"{odd_data}?most_pixels=200")) == 2
    with pytest.raises(ValueError, match=r"image 5: .* make 200 pixels, but most_pixels is 199"):
        open_detection(f"{odd_data}?most_pixels=199")
    with pytest.raises(ValueError, match=r"json has \d+ bytes, but most_annotation_bytes is 9"):
        open_detection(f"{odd_data}?most_annotation_bytes=9")
    with pytest.raises(ValueError, match=r"has 2 categories, but most_classes is 1"):
        open_detection(f"{odd_data}?most_classes=1")


def test_unreadable_images_are_replaced(odd_data):
    (odd_data / "b.png").write_bytes(b"no image")
    with pytest.warns(UnreadableImageWarning, match=r"b\.png"):
        _, target = open_detection(odd_data)[1]
    assert target["image_id"].item() == 5


def test_generated_source():
    dataset = open_detection("shapes:size=32,images=6,classes=3", split="train")
    assert isinstance(dataset, ShapesDetection)
    assert (len(dataset), dataset.num_classes) == (6, 3)


@pytest.mark.parametrize("size", [None, 40, (24, 56)])
def test_evaluation_only_resizes(scenes, size):
    image, target = detection_transforms(False, size)(*scenes[0])
    plain_image, plain = scenes[0]
    height, width = (64, 64) if size is None else (size, size) if isinstance(size, int) else size
    assert image.shape == (3, height, width)
    assert image.dtype == torch.float32
    assert type(image) is torch.Tensor
    assert image.max() <= 1.0
    scale = torch.tensor([width, height, width, height]) / 64
    assert torch.allclose(target["boxes"], plain["boxes"].as_subclass(torch.Tensor) * scale)
    assert target["masks"].shape[1:] == (height, width)
    assert torch.equal(target["orig_size"], plain["orig_size"])
    if size is None:
        assert torch.allclose(image, plain_image / 255)


@pytest.mark.parametrize("crops", [True, False])
def test_training_moves_image_boxes_and_masks_together(crops):
    shapes = {"num_images": 12, "image_size": 64, "num_classes": 5, "empty_ratio": 0.0}
    dataset = ShapesDetection(**shapes)
    varied = detection_transforms(True, 64, crops=crops, hflip=1.0)
    varied = ShapesDetection(**shapes, transforms=varied)
    flipped = 0
    for index in range(12):
        with random_numbers_of(index):
            image, target = varied[index]
        assert image.shape == (3, 64, 64)
        count = len(target["boxes"])
        assert all(len(target[name]) == count for name in ("labels", "masks", "area", "iscrowd"))
        assert torch.equal(target["area"], target["masks"].sum((1, 2)).float())
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            ys, xs = mask.nonzero().T
            found = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
            # A crop cuts a box straight, a shape where it is: the mask lies within its box.
            slack = torch.tensor([1.0, 1.0, -1.0, -1.0])
            assert ((found - box + slack) * slack.sign() >= 0).all()
        if not crops:
            before = dataset[index][1]["boxes"].as_subclass(torch.Tensor)
            assert torch.allclose(target["boxes"][:, 0], 64 - before[:, 2])
            flipped += 1
    assert crops or flipped == 12


def test_training_batches_repeat_exactly(scenes):
    dataset = copy(scenes)
    dataset.transforms = detection_transforms(True)
    loaders = [
        build_loader(
            dataset, batch_size=3, workers=workers, training=True, collate=collate_detection
        )
        for workers in (0, 1)
    ]
    epochs = []
    for loader in loaders:
        loader.set_epoch(4)
        epochs.append(list(loader))
    assert len(epochs[0]) == len(epochs[1]) == 2
    for one, other in zip(*epochs, strict=True):
        assert len(one.images) == len(one.targets) == 3
        assert all(torch.equal(a, b) for a, b in zip(one.images, other.images, strict=True))
        for a, b in zip(one.targets, other.targets, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.real
@pytest.mark.filterwarnings(COPY)
def test_coco_archive(real_data):
    mask_tools = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")
    dataset = open_detection(real_data / "coco-128.zip")
    assert isinstance(dataset, CocoDetection)
    assert (len(dataset), dataset.num_classes) == (128, 80)
    assert dataset.category_ids[-1] == 90
    entries = {item["id"]: item for item in dataset.coco_dict()["annotations"]}
    assert len(entries) == 900
    total = crowds = 0
    for index in range(0, 128, 4):
        image, target = dataset[index]
        _, height, width = image.shape
        total += len(target["labels"])
        crowds += int(target["iscrowd"].sum())
        own = [item for item in entries.values() if item["image_id"] == target["image_id"]]
        for item, mask in zip(own, target["masks"], strict=True):
            packed = mask_tools.frPyObjects(item["segmentation"], height, width)
            packed = mask_tools.merge(packed) if isinstance(packed, list) else packed
            assert (mask_tools.decode(packed) == np.asarray(mask)).all()
    assert total > 150
    assert crowds > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\x7f", "is malformed: compressed run lengths contain"),
        ("0P", "is malformed: compressed run lengths end in the middle of a number"),
        ("é", "is malformed: compressed run lengths contain"),
    ],
)
def test_damaged_masks_are_refused_before_pycocotools_reads_them(odd_data, text, message):
    path = odd_data / "instances.json"
    data = json.loads(path.read_text())
    data["annotations"][-1]["segmentation"]["counts"] = text
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        open_detection(odd_data)
