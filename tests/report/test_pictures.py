"""Pictures: what is painted where, and figures that can be written."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ltm
from ltm.core.schedule import Grid
from ltm.data.images import ImageDataset
from ltm.data.shapes import ShapesClassification
from ltm.methods import methods
from ltm.report.pictures import (
    Scenes,
    choose_target,
    data_pictures,
    data_uri,
    enlarge,
    figure_bytes,
    film_bytes,
    groups_figure,
    layer_frames,
    maps_at,
    merging_blocks,
    paint_groups,
    paint_weights,
    rescale,
    spread_cells,
    weights_figure,
)
from ltm.report.tracing import SiteMap, trace


def test_pixels_are_what_the_network_sees(scenes: Scenes) -> None:
    back = (scenes.inputs[0] * 127.5 + 127.5).permute(1, 2, 0).round().byte().numpy()
    assert (back == scenes.pixels[0]).all()


def test_pictures_of_data_are_named_by_class_as_well_as_it_is_known() -> None:
    dataset = ShapesClassification("val", 5, 16, 3)
    first, second, third = dataset.class_names
    assert [name for name, _ in data_pictures(dataset)] == [first, second, third, first, second]
    known = ("tench, Tinca tinca", "dog", "great white shark, white shark")
    named = [name for name, _ in data_pictures(dataset, known)]
    assert named == ["tench", "dog", "great white shark", "tench", "dog"]
    unlabelled = ImageDataset(dataset.files, dataset.labels, ())
    assert [name for name, _ in data_pictures(unlabelled)][:2] == ["image 1", "image 2"]


def test_cells_cover_the_image_evenly() -> None:
    cells = np.arange(9).reshape(3, 3)
    spread = spread_cells(cells, (10, 12))
    assert spread.shape == (10, 12)
    assert (np.unique(spread) == np.arange(9)).all()
    assert (spread_cells(cells, (6, 6))[::2, ::2] == cells).all()


def test_only_patches_with_weight_are_coloured() -> None:
    pixels = np.full((16, 16, 3), 120, dtype=np.uint8)
    weights = np.zeros((4, 4), dtype=np.float32)
    weights[1, 2], weights[0, 0] = 0.75, 0.25
    painted = paint_weights(pixels, weights)
    coloured = (painted != painted[15, 15]).any(2)
    assert coloured[4:8, 8:12].all()
    assert coloured[:4, :4].all()
    assert coloured.sum() == 32
    assert painted[5, 9].sum() > painted[1, 1].sum(), "the larger weight is the brighter one"
    grey = paint_weights(pixels, np.zeros((4, 4), dtype=np.float32))
    assert (grey == grey[0, 0]).all()


def test_groups_get_their_mean_colour_and_the_others_keep_their_pixels() -> None:
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    pixels[:, :8], pixels[:, 8:] = 100, 200
    groups = np.array([[0, 0], [1, -1]])
    painted = paint_groups(pixels, groups)
    assert painted[2, 2, 0] == painted[2, 12, 0] == 150
    assert painted[12, 2, 0] == 100
    assert painted[12, 12, 0] == 255
    assert painted[8, 2, 0] < 100, "a line between groups"


def test_the_target_lies_in_the_group_that_stands_out() -> None:
    pixels = np.full((32, 32, 3), 40, dtype=np.uint8)
    pixels[8:16, 8:24] = 250
    groups = np.arange(64).reshape(8, 8)
    groups[6:, :] = 99  # a large group of background
    groups[2:4, 2:6] = 100  # the bright one
    row, column = choose_target(pixels, groups)
    assert groups[row, column] == 100
    assert choose_target(pixels, np.arange(64).reshape(8, 8)) == (4, 4)


def test_figures_hold_a_column_per_image_and_a_row_per_method(
    vit: nn.Module, scenes: Scenes
) -> None:
    traces = _traces(vit, scenes)
    figure = weights_figure(scenes, traces, 3, targets=[(2, 2), (3, 3), (4, 4)])
    assert len(figure.axes) == 3 * 3 + 1  # and the bar of colours
    assert figure_bytes(figure).startswith(b"\x89PNG")
    assert len(groups_figure(scenes, traces, 3).axes) == 9


def test_before_any_merge_there_is_nothing_to_draw(vit: nn.Module, scenes: Scenes) -> None:
    ltm.merge_tokens_(vit, ltm.LTM(counts=(40,), sites=(2,)))
    traces = {"LTM": trace(vit, scenes.inputs)}
    with pytest.raises(ValueError, match="no method has merged anything"):
        maps_at(traces, 0, len(scenes))


def test_targets_follow_to_another_grid() -> None:
    assert rescale((13, 7), (14, 14), (7, 7)) == (6, 3)
    assert rescale((4, 5), (5, 6), (7, 7)) == (5, 5)


def test_a_film_has_a_frame_per_merging_block_and_one_before(
    vit: nn.Module, scenes: Scenes
) -> None:
    traces = _traces(vit, scenes)
    film: Any = Image.open(io.BytesIO(film_bytes(layer_frames(scenes, traces, 0))))
    assert film.format == "GIF"
    assert film.n_frames == len(merging_blocks(traces)) + 1 == 5


_SWIN = {"img_size": 112, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "side", "method", "grid"),
    [
        ("efficientvit_b0", {}, 160, "ltm", (10, 10)),
        ("swin_tiny_patch4_window7_224", _SWIN, 112, "ltm", (28, 28)),
        ("swin_tiny_patch4_window7_224", _SWIN, 112, "tome", (28, 28)),
    ],
)
def test_grid_networks_can_be_drawn_too(
    name: str, arguments: dict[str, Any], side: int, method: str, grid: Grid, scenes: Scenes
) -> None:
    import timm

    model = timm.create_model(name, num_classes=3, **arguments)
    ltm.merge_tokens_(model, methods()[method](per_block=0.6), side)
    site = trace(model, torch.randn(1, 3, side, side))[0]
    assert site.group_grid(0).shape == site.grid == grid
    painted = paint_groups(enlarge(scenes.pixels[0]), site.group_grid(0))
    assert painted.shape == enlarge(scenes.pixels[0]).shape


def test_a_data_uri_holds_its_content() -> None:
    assert data_uri(b"abc", "image/png") == "data:image/png;base64,YWJj"


def _traces(vit: nn.Module, scenes: Scenes) -> dict[str, list[SiteMap]]:
    traces = {}
    for method in ("tome", "ltm"):
        ltm.merge_tokens_(vit, methods()[method](per_block=0.8))
        traces[method] = trace(vit, scenes.inputs)
        ltm.unmerge_tokens_(vit)
    return traces
