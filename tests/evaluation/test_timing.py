"""Clocks and what their ratios say; times are made up, so that no machine matters."""

import math
from collections import Counter
from itertools import pairwise, permutations

import pytest
import torch

from ltm.evaluation import latency
from ltm.evaluation.latency import Estimate, interleaved, speedup, spread, verdict

CPU = torch.device("cpu")


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = interleaved(calls, CPU, rounds=4, warmup=1, least_seconds=0)
    # One warm-up and one call to learn its length, of each; then rounds, each in another order.
    assert "".join(order) == "aabbcc" + "abc" + "acb" + "cab" + "cba"
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abc", 4)


@pytest.mark.parametrize("number", range(1, 9))
def test_each_follows_each_other_equally_often(number: int) -> None:
    names = "abcdefgh"[:number]
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in names}
    times = 1 + number % 2
    interleaved(calls, CPU, rounds=times * number, warmup=0, least_seconds=0)
    turns = order[number:]  # after one call to learn the length of each
    rounds = [turns[i : i + number] for i in range(0, len(turns), number)]
    assert all(sorted(turn) == list(names) for turn in rounds)
    follows = Counter(pair for turn in rounds for pair in pairwise(turn))
    assert follows == dict.fromkeys(permutations(names, 2), times)


def test_short_calls_are_repeated_within_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[int] = []

    def clock(call: object, device: torch.device, repeats: int = 1) -> float:
        repeated.append(repeats)
        return 0.004

    monkeypatch.setattr(latency, "time_call", clock)
    interleaved({"a": lambda: None}, CPU, rounds=2, least_seconds=0.02)
    assert repeated == [1, 5, 5]


def test_seconds_are_per_call() -> None:
    def call() -> None:
        end = latency.time.perf_counter() + 0.002
        while latency.time.perf_counter() < end:
            pass

    assert latency.time_call(call, CPU, repeats=5) >= 0.002


def test_drift_of_the_machine_cancels_within_rounds() -> None:
    drift = [1.0, 1.1, 2.0, 3.0, 5.0, 1.0, 1.0, 0.9, 1.4]
    found = speedup(drift, [value / 1.25 for value in drift])
    assert (found.median, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_interval_of_the_median_covers_it_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    for rounds in (9, 15, 30):
        hits = 0
        for _ in range(400):
            # Skewed, as times are.
            times = torch.empty(rounds).exponential_(generator=generator).tolist()
            found = speedup(times, [1.0] * rounds)
            hits += found.low <= math.log(2) <= found.high
        assert hits / 400 >= 0.93
        assert found.low > min(times)


def test_few_rounds_give_their_whole_range() -> None:
    found = speedup([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    assert (found.low, found.median, found.high) == (1, 2, 3)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ((1.27, 1.25, 1.30), "1.27x"),
        ((1.05, 0.99, 1.30), "no gain here"),
        ((1.01, 1.001, 1.02), "no gain here"),
        ((0.97, 0.90, 1.0), "no gain here"),
        ((0.84, 0.80, 0.90), "0.84x, slower"),
    ],
)
def test_verdicts_are_plain(ratio: tuple[float, float, float], words: str) -> None:
    median, low, high = ratio
    assert verdict(Estimate(median=median, low=low, high=high)) == words


def test_spread_is_median_and_quartiles() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.median, found.high) == (2, 3, 4)


def test_rounds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rounds is 0"):
        interleaved({}, CPU, rounds=0)
