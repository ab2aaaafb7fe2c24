"""Masks are packed and unpacked as pycocotools does."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from ltm.data.targets import decode_mask, encode_mask

coco_mask = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")


def run_lengths(mask):
    """Count pixels down the columns, outside first."""
    changes = np.flatnonzero(np.diff(mask.ravel(order="F"), prepend=False))
    return np.diff(changes, prepend=0, append=mask.size).tolist()


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12), st.floats(0, 1))
def test_run_lengths_agree_with_pycocotools(seed, height, width, share):
    mask = np.random.default_rng(seed).random((height, width)) < share
    found = encode_mask(torch.from_numpy(mask))
    packed = coco_mask.encode(np.asfortranarray(mask, np.uint8))["counts"]
    assert found["counts"].encode() == packed
    assert (decode_mask(found, height, width) == mask).all()
    plain = {"size": [height, width], "counts": run_lengths(mask)}
    assert (decode_mask(plain, height, width) == mask).all()


def test_long_runs_survive_compression():
    mask = np.zeros((700, 900), dtype=bool)
    mask[10:650, 20:870] = True
    mask[300, 400] = False
    assert (decode_mask(encode_mask(torch.from_numpy(mask)), 700, 900) == mask).all()


@given(
    st.lists(st.tuples(st.floats(-5, 30), st.floats(-5, 25)), min_size=3, max_size=9),
    st.integers(1, 20),
    st.integers(1, 25),
)
def test_polygons_agree_with_pycocotools(corners, height, width):
    polygon = [float(value) for corner in corners for value in corner]
    packed = coco_mask.merge(coco_mask.frPyObjects([polygon], height, width))
    expected = coco_mask.decode(packed).astype(bool)
    assert (decode_mask([polygon], height, width) == expected).all()


def test_several_polygons_are_united():
    squares = [[0, 0, 4, 0, 4, 4, 0, 4], [2, 2, 8, 2, 8, 8, 2, 8]]
    mask = decode_mask(squares, 10, 10)
    assert mask.sum() == 16 + 36 - 4
    assert mask[3, 3]
