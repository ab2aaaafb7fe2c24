import random
from itertools import product

import numpy as np
import pytest
import torch

from ltm.data.sampling import TrainingSampler, make_key, random_numbers_of


def test_keys_are_distinct_and_fit_every_generator():
    keys = {make_key(*parts) for parts in product(range(3), range(9), range(99))}
    assert len(keys) == 3 * 9 * 99
    assert all(0 <= key < 2**63 for key in keys)
    assert make_key(1, 2) != make_key(2, 1)


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


def test_random_numbers_are_the_keys_and_then_what_they_were():
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    with random_numbers_of(7):
        first = draw()
    with random_numbers_of(8):
        other = draw()
    with random_numbers_of(7):
        again = draw()
    assert first == again
    assert not set(first) & set(other)
    assert random.getstate() == before[0]
    assert str(np.random.get_state()) == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def test_random_numbers_return_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(KeyError), random_numbers_of(7):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_is_a_new_order_that_can_come_again():
    sampler = TrainingSampler(range(50), seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert sorted(drawn.index for drawn in second) == list(range(50))
    assert [drawn.index for drawn in first] != [drawn.index for drawn in second]
    assert not {drawn.key for drawn in first} & {drawn.key for drawn in second}
    assert list(TrainingSampler(range(50), seed=4)) != first


def test_processes_together_see_what_one_sees():
    whole = list(TrainingSampler(range(21), seed=1))
    samplers = [TrainingSampler(range(21), seed=1, rank=rank, world_size=4) for rank in range(4)]
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [5] * 4
    together = [drawn for turn in zip(*shares, strict=True) for drawn in turn]
    assert together == whole[:20]


@pytest.mark.parametrize("num_images", [40, 600])
def test_repeated_augmentation(num_images):
    shares = []
    for rank in range(2):
        sampler = TrainingSampler(range(num_images), seed=1, rank=rank, world_size=2, repeats=3)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler) == (20 if num_images == 40 else 256)
    together = [drawn for turn in zip(*shares, strict=True) for drawn in turn]
    counts = np.bincount([drawn.index for drawn in together])
    assert set(counts[counts > 0][:-1]) <= {1, 2, 3}
    assert (counts == 3).sum() >= len(together) // 3 - 1
    assert len({drawn.key for drawn in together}) == len(together)  # each time augmented anew
    other = TrainingSampler(range(num_images), seed=2, repeats=3)
    assert [drawn.index for drawn in other][:9] != [drawn.index for drawn in together][:9]


def test_an_epoch_may_draw_only_some_images() -> None:
    whole, some = TrainingSampler(range(50), seed=3), TrainingSampler(range(50), epoch_images=20)
    some.seed = 3
    assert len(some) == 20
    assert [draw.index for draw in some] == [draw.index for draw in whole][:20]
    some.set_epoch(1)
    assert {draw.index for draw in some} != {draw.index for draw in whole}
    assert len(TrainingSampler(range(5), epoch_images=20)) == 5
    shares = [TrainingSampler(range(50), epoch_images=21, rank=r, world_size=2) for r in (0, 1)]
    first, second = ([draw.index for draw in share] for share in shares)
    assert len(first) == len(second) == 10
    assert not set(first) & set(second)
    with pytest.raises(ValueError, match="epoch_images is 20 and repeats is 3"):
        TrainingSampler(range(50), epoch_images=20, repeats=3)
