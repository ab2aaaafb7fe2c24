"""Costs follow from rates."""

import pytest

from reproduction.benchmarks.embed_cost import cost


def test_a_million_images_cost_what_their_rate_says() -> None:
    row = {"model": "a", "size": 224, "ratio": 0.5, "embed_images_per_second": 1e6 / 3600}
    row["network_images_per_second"] = 2e6 / 3600
    found = cost(row, price=3.0)
    assert found["minutes per million"] == pytest.approx(60)
    assert found["cost per million"] == pytest.approx(3.0)
    assert found["where reading is no limit"] == pytest.approx(1.5)
