"""Batches that are fetched ahead come in the same order, each once."""

from collections.abc import Iterator

from ltm.data.batches import Lookahead


def test_fetching_ahead_changes_neither_order_nor_number() -> None:
    asked: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(4):
            asked.append(number)
            yield number

    batches = Lookahead(numbers())
    found: list[int] = []
    for number in batches:
        found.append(number)
        if number != 1:
            batches.fetch()
            batches.fetch()
            assert asked == list(range(min(number + 2, 4)))
    assert found == [0, 1, 2, 3]
    batches.fetch()
    assert not list(batches)
