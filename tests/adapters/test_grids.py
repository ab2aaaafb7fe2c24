"""Maps of grid networks."""

import pytest
import torch
from timm.models.swin_transformer import WindowAttention

from ltm.adapters.grids import stretch, stretch_by_products
from ltm.adapters.swin import WindowMerge, Windows
from ltm.core.merge import DenseMerge


@pytest.mark.parametrize("size", [(4, 4), (3, 7), (12, 2)])
def test_products_stretch_a_map_as_torch_does(size):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 6)
    expected = stretch(x, size)
    assert torch.allclose(stretch_by_products(x, size), expected, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        found = stretch_by_products(x, size)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("grid", "shift"), [((8, 8), (0, 0)), ((10, 7), (2, 1)), ((9, 12), (2, 2))]
)
@pytest.mark.parametrize("sized", [False, True])
def test_windows_by_one_copy_attend_as_windows_cut_step_by_step(grid, shift, sized):
    torch.manual_seed(0)
    attention = WindowAttention(8, 2, window_size=4).eval()
    windows = Windows(grid, (4, 4), shift)
    x = torch.randn(2, *grid, 8)
    size = torch.randint(1, 5, (1, grid[0] * grid[1])).float() if sized else None
    for _ in range(2):
        step_by_step = windows.attend(attention, x.clone().requires_grad_(), size)
        torch.testing.assert_close(windows.attend(attention, x, size), step_by_step)
        if size is not None:
            size.copy_(torch.randint(1, 5, size.shape))  # what is kept of sizes follows them


def test_windows_merge_the_sizes_of_a_batch():
    windows = Windows((4, 4), (2, 2), (0, 0))
    inner = DenseMerge.from_support(torch.ones(12, 4, 1))
    merge = WindowMerge(inner=inner, windows=windows)
    size = torch.rand(3, 16)
    assert torch.allclose(merge.sizes(size).sum(1), size.sum(1))
