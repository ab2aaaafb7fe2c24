import copy
import math

import pytest

from ltm.detection.coco import check_annotations


@pytest.fixture
def data():
    return {
        "images": [{"id": 7, "file_name": "a.png", "width": 10, "height": 8, "licence": 1}],
        "categories": [{"id": 90, "name": "dog"}, {"id": 3, "name": "cat"}],
        "annotations": [
            {
                "id": 11,
                "image_id": 7,
                "category_id": 90,
                "bbox": [1, 2, 3.5, 4],
                "area": 12,
                "iscrowd": 0,
                "segmentation": [[1, 2, 4, 2, 4, 6]],
            },
            {"id": 12, "image_id": 7, "category_id": 3, "bbox": [0, 0, 2, 3]},
        ],
    }


def test_a_good_file(data):
    found = check_annotations(data)
    assert found.categories == {3: "cat", 90: "dog"}
    assert list(found.categories) == [3, 90]
    first, second = found.by_image[7]
    assert first.bbox == (1.0, 2.0, 3.5, 4.0)
    assert (second.area, second.iscrowd, second.segmentation) == (6.0, False, None)
    assert first.mask(8, 10).any()
    with pytest.raises(ValueError, match="annotation 12: segmentation: is missing"):
        second.mask(8, 10)


MISSING = object()
BAD = [
    # where, field, value, what the message says
    (("annotations", 0), "id", MISSING, "annotation number 0: id is missing"),
    (("annotations", 0), "id", "11", "annotation number 0: id must be a whole number"),
    (("annotations", 0), "id", 12, "annotation 12: id is used twice"),
    (("annotations", 0), "image_id", MISSING, "annotation 11: image_id is missing"),
    (("annotations", 0), "image_id", 8, "annotation 11: image_id is 8, which no image has"),
    (("annotations", 0), "image_id", [7], "annotation 11: image_id must be a whole number"),
    (("annotations", 0), "category_id", 1, "annotation 11: category_id is 1, which no category"),
    (("annotations", 0), "category_id", True, "annotation 11: category_id must be a whole"),
    (("annotations", 0), "bbox", MISSING, "annotation 11: bbox is missing"),
    (("annotations", 0), "bbox", [1, 2, 3], "annotation 11: bbox must hold x, y, width"),
    (("annotations", 0), "bbox", {"x": 1}, "annotation 11: bbox must be a list"),
    (("annotations", 0), "bbox", [1, 2, "3", 4], "annotation 11: bbox must hold numbers"),
    (("annotations", 0), "bbox", [1, 2, None, 4], "annotation 11: bbox must hold numbers"),
    (("annotations", 0), "bbox", [1, 2, math.nan, 4], "annotation 11: bbox must hold finite"),
    (("annotations", 0), "bbox", [1, 2, 10**400, 4], "annotation 11: bbox must hold finite"),
    (("annotations", 0), "area", math.inf, "annotation 11: area must hold finite"),
    (("annotations", 0), "area", "big", "annotation 11: area must hold numbers"),
    (("annotations", 0), "iscrowd", 2, "annotation 11: iscrowd must be 0 or 1"),
    (("annotations", 0), "iscrowd", [], "annotation 11: iscrowd must be 0 or 1"),
    (("annotations", 0), "segmentation", "xyz", "annotation 11: segmentation must be polygons"),
    (("annotations", 0), "segmentation", [[1, 2, 3, 4]], "annotation 11: segmentation .* three"),
    (("annotations", 0), "segmentation", [[1] * 7], "annotation 11: segmentation .* three points"),
    (("annotations", 0), "segmentation", [1] * 6, "annotation 11: segmentation .* three points"),
    (("annotations", 0), "segmentation", [[1, 2, 3, 4, 5, math.nan]], "11: segmentation .*finite"),
    (("annotations", 0), "segmentation", {"counts": [80]}, "segmentation has size None, but"),
    (("annotations", 0), "segmentation", {"size": [10, 8], "counts": [80]}, "has size .10, 8."),
    (("annotations", 0), "segmentation", {"size": [8, 10]}, "annotation 11: segmentation has no"),
    (("annotations", 0), "segmentation", {"size": [8, 10], "counts": [70]}, "do not fill 10 x 8"),
    (("annotations", 0), "segmentation", {"size": [8, 10], "counts": [81, -1]}, "no whole numbers"),
    (("annotations", 0), "segmentation", {"size": [8, 10], "counts": [8e1]}, "no whole numbers"),
    (("annotations", 0), "segmentation", {"size": [8, 10], "counts": "0P"}, "is malformed"),
    (("annotations", 0), "segmentation", {"size": [8, 10], "counts": "o" * 20 + "0"}, "60 bits"),
    (
        ("annotations", 0),
        "segmentation",
        [[0, 0, 1e300, 0, 0, 9]],
        "must stay below 4194304",
    ),
    (("annotations", 0), "segmentation", [[0, 0, 9e5, 0, 0, 9] * 3], "outlines of at most 4194304"),
    (("annotations", 0), "id", 2**63, "id must fit into 64 bits"),
    (("images", 0), "id", 10**400, "id must fit into 64 bits"),
    (("images", 0), "width", 10**4000, "width must be at least 1 and below 2147483648"),
    (("images", 0), "width", 10**9, "image 7: width and height make 8000000000 pixels, but most_"),
    (("images", 0), "id", MISSING, "image number 0: id is missing"),
    (("images", 0), "file_name", 3, "image 7: file_name must be text"),
    (("images", 0), "width", 0, "image 7: width must be at least 1"),
    (("images", 0), "height", 8.0, "image 7: height must be a whole number"),
    (("categories", 0), "name", MISSING, "category 90: name is missing"),
    (("categories", 0), "id", 3, "category 3: id is used twice"),
]


@pytest.mark.parametrize(("where", "field", "value", "message"), BAD)
def test_bad_entries_are_named(data, where, field, value, message):
    section, number = where
    broken = copy.deepcopy(data)
    if value is MISSING:
        del broken[section][number][field]
    else:
        broken[section][number][field] = value
    with pytest.raises(ValueError, match=message) as caught:
        check_annotations(broken, "file.json")
    assert str(caught.value).startswith("file.json: ")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "must hold an object"),
        ({"images": [], "annotations": []}, "no list of categories"),
        ({"images": {}, "annotations": [], "categories": []}, "no list of images"),
        ({"images": [3], "annotations": [], "categories": []}, "image number 0 must be an object"),
    ],
)
def test_bad_files_are_refused(broken, message):
    with pytest.raises(ValueError, match=message):
        check_annotations(broken)


def test_no_images_at_all_is_a_valid_file():
    assert check_annotations({"images": [], "annotations": [], "categories": []}).images == ()
