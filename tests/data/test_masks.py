import numpy as np
import pytest
from hypothesis import given, strategies as st

from ltm.data.masks import decode_counts, encode_counts, fill_polygons, parse_counts

# Of pycocotools under NumPy 2.
COPY = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
coco_mask = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12), st.floats(0, 1))
def test_run_lengths_agree_with_pycocotools(seed, height, width, share):
    mask = np.random.default_rng(seed).random((height, width)) < share
    counts = encode_counts(mask)
    assert sum(counts) == mask.size
    assert (decode_counts(counts, height, width) == mask).all()
    packed = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"]
    assert parse_counts(packed) == parse_counts(packed.decode()) == counts


def test_long_runs_survive_compression():
    mask = np.zeros((700, 900), dtype=bool)
    mask[10:650, 20:870] = True
    mask[300, 400] = False
    packed = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"]
    assert parse_counts(packed) == encode_counts(mask)


@pytest.mark.filterwarnings(COPY)
@given(
    st.lists(st.tuples(st.floats(-5, 30), st.floats(-5, 25)), min_size=3, max_size=9),
    st.integers(1, 20),
    st.integers(1, 25),
)
def test_polygons_agree_with_pycocotools(corners, height, width):
    polygon = [float(value) for corner in corners for value in corner]
    packed = coco_mask.merge(coco_mask.frPyObjects([polygon], height, width))
    expected = coco_mask.decode(packed).astype(bool)
    assert (fill_polygons([polygon], height, width) == expected).all()


def test_several_polygons_are_united():
    squares = [[0, 0, 4, 0, 4, 4, 0, 4], [2, 2, 8, 2, 8, 8, 2, 8]]
    mask = fill_polygons(squares, 10, 10)
    assert mask.sum() == 16 + 36 - 4
    assert mask[3, 3]


@pytest.mark.parametrize(
    ("counts", "message"), [([3, 3], "add up"), ([-1, 17], "add up"), ([[16]], "add up")]
)
def test_wrong_run_lengths_are_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        decode_counts(counts, 4, 4)


@pytest.mark.parametrize(("text", "message"), [("\x7f", "contain"), ("é", None), ("0P", "middle")])
def test_damaged_compression_is_refused(text, message):
    if message is None:
        assert parse_counts(text) == [15]  # "?", a legal code: caught later, by the sum
        return
    with pytest.raises(ValueError, match=message):
        parse_counts(text)
