"""Maps of grid networks."""

import pytest
import torch

from ltm.adapters.grids import stretch, stretch_by_products


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
