from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import gloo_worker
from ltm.core.bottleneck import ClassStatistics, class_membership, information_bottleneck
from strategies import Samples, samples


def batches(drawn: Samples, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, len(drawn.labels), size)]


def first_pass(x: torch.Tensor, drawn: Samples, size: int) -> ClassStatistics:
    statistics = ClassStatistics.zeros(drawn.num_classes, x.shape[1])
    for batch in batches(drawn, size):
        statistics.update(x[batch], drawn.labels[batch])
    return statistics


def two_passes(drawn: Samples, size: int) -> ClassStatistics:
    merged, inputs = (first_pass(x, drawn, size) for x in (drawn.merged, drawn.inputs))
    statistics = ClassStatistics.zeros(drawn.num_classes, drawn.merged.shape[1])
    for batch in batches(drawn, size):
        statistics.update(
            drawn.merged[batch],
            drawn.labels[batch],
            class_membership(drawn.merged[batch], merged.centroids(), drawn.beta, merged.present),
            class_membership(drawn.inputs[batch], inputs.centroids(), drawn.beta, inputs.present),
        )
    return statistics


@given(samples(), st.integers(1, 40))
def test_streamed_batches_equal_one_go(drawn: Samples, size: int) -> None:
    streamed = two_passes(drawn, size).bottleneck()
    whole = information_bottleneck(
        drawn.merged, drawn.inputs, drawn.labels, drawn.num_classes, drawn.beta
    )
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(streamed, name), value, rtol=1e-9, atol=1e-9)


@given(samples())
def test_q_is_the_mean_membership_of_a_label(drawn: Samples) -> None:
    statistics = two_passes(drawn, 7)
    centroids = first_pass(drawn.merged, drawn, 7).centroids()
    phi = class_membership(drawn.merged, centroids, drawn.beta, statistics.present)
    q = statistics.q(floor=0.0)
    torch.testing.assert_close(q.sum(0), torch.ones_like(q[0]))
    for y in drawn.labels.unique().tolist():
        torch.testing.assert_close(q[:, y], phi[drawn.labels == y].mean(0))


def test_before_any_membership_q_is_uniform() -> None:
    statistics = ClassStatistics.zeros(4, 3)
    statistics.update(torch.randn(5, 3), torch.tensor([0, 1, 1, 2, 2]))
    torch.testing.assert_close(statistics.q(), torch.full((4, 4), 0.25, dtype=torch.float64))
    assert statistics.present.tolist() == [True, True, True, False]
    assert statistics.centroids()[3].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_gradient_stay_outside(dtype: torch.dtype) -> None:
    features = torch.randn(6, 3).to(dtype).requires_grad_()
    statistics = ClassStatistics.zeros(2, 3)
    statistics.update(features, torch.arange(6) % 2, torch.rand(6, 2, requires_grad=True))
    assert all(value.dtype == torch.float64 for value in statistics.state().values())
    assert not any(value.requires_grad for value in statistics.state().values())
    exact = ClassStatistics.zeros(2, 3)
    exact.update(features.float(), torch.arange(6) % 2)
    assert torch.equal(statistics.features, exact.features)


def test_sums_survive_buffers() -> None:
    module = torch.nn.Module()
    for name, value in ClassStatistics.zeros(3, 2).state().items():
        module.register_buffer(name, value)
    statistics = ClassStatistics(**dict(module.named_buffers()))
    statistics.update(torch.randn(4, 2), torch.tensor([0, 0, 1, 2]))
    assert module.state_dict()["counts"].tolist() == [2, 1, 1]


def test_alone_all_reduce_is_a_copy() -> None:
    statistics = ClassStatistics.zeros(3, 2)
    statistics.update(torch.randn(4, 2), torch.tensor([0, 0, 1, 2]))
    reduced = statistics.all_reduce()
    for name, value in statistics.state().items():
        assert torch.equal(reduced.state()[name], value)
    statistics.update(torch.randn(4, 2), torch.tensor([0, 0, 1, 2]))
    assert reduced.counts.tolist() == [2, 1, 1]


@pytest.mark.slow
def test_two_processes_with_uneven_shards_equal_one(tmp_path: Path) -> None:
    num_classes, beta = 5, 8.0
    labels = torch.cat([torch.zeros(9, dtype=torch.int64), torch.randint(4, (31,))])  # 4 is empty
    data = {"features": torch.randn(40, 6), "inputs": torch.randn(40, 7), "labels": labels}
    torch.save(data, tmp_path / "data.pt")
    bounds = [0, 9, 40]  # the first shard holds a single class
    torch.multiprocessing.spawn(
        gloo_worker.run, (str(tmp_path), bounds, num_classes, beta), nprocs=2
    )
    single = gloo_worker.collect(data, num_classes, beta)
    for rank in range(2):
        reduced = ClassStatistics(**torch.load(tmp_path / f"rank{rank}.pt"))
        assert reduced.counts.sum() == 40
        for name, value in single.state().items():
            torch.testing.assert_close(reduced.state()[name], value, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(reduced.centroids(), single.centroids(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(reduced.q(), single.q(), rtol=1e-6, atol=1e-6)
        assert float(reduced.bottleneck().loss) == pytest.approx(
            float(single.bottleneck().loss), abs=1e-6
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(0, 2)}, r"features has shape \(0, 2\): a batch of at least one"),
        ({"features": torch.zeros(4, 3)}, r"features has shape \(4, 3\): \(4, 2\) is needed"),
        ({"labels": torch.tensor([0, 1, 2, 3])}, "labels range from 0 to 3: with 3 classes"),
        ({"labels": torch.tensor([0, 1])}, r"labels has shape \(2,\): \(4,\) is needed"),
        ({"membership": torch.zeros(4, 2)}, r"membership has shape \(4, 2\): \(4, 3\) is needed"),
        ({"input_membership": torch.zeros(4, 3)}, "membership is None"),
    ],
)
def test_bad_batches_are_named_and_change_nothing(
    change: dict[str, Any], message: str, unchecked_shapes: None
) -> None:
    statistics = ClassStatistics.zeros(3, 2)
    good: dict[str, Any] = {"features": torch.ones(4, 2), "labels": torch.tensor([0, 1, 2, 0])}
    with pytest.raises(ValueError, match=message):
        statistics.update(**(good | change))
    assert all(value.count_nonzero() == 0 for value in statistics.state().values())


def test_other_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="num_classes is 0"):
        ClassStatistics.zeros(0, 2)
    with pytest.raises(ValueError, match="width is -1"):
        ClassStatistics.zeros(3, -1)
    with pytest.raises(ValueError, match="0 samples came with membership"):
        ClassStatistics.zeros(3, 2).bottleneck()
    with pytest.raises(ValueError, match=r"floor is 1\.0"):
        ClassStatistics.zeros(3, 2).q(floor=1.0)
