"""Maps of grid networks."""

import pytest
import torch

from ltm.adapters.grids import stretch, stretch_by_products


@pytest.mark.parametrize("size", [(4, 4), (3, 7), (12, 2)])
def test_products_stretch_a_map_as_torch_does(size):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 6)
    assert torch.allclose(stretch_by_products(x, size), stretch(x, size), atol=1e-6)
