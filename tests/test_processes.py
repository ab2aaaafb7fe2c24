"""Two processes with uneven shares give what one process gives."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evaluation_worker import JOBS, Job, batches_of, in_processes
from ltm.evaluation.bottleneck import SiteBottleneck

pytestmark = pytest.mark.slow


def labelled(shape: tuple[int, ...], num_classes: int) -> dict[str, Tensor]:
    return {"images": torch.randn(shape), "labels": torch.randint(num_classes, shape[:1])}


def test_a_process_without_statistics_images_adds_none(tmp_path: Path) -> None:
    """In 0.1.0 it raised an error, and the others waited for it for ever."""
    torch.manual_seed(1)
    jobs: list[Job] = [
        ("statistics", labelled((6, 3, 64, 64), 3), (6, 0)),
        ("statistics", labelled((6, 3, 64, 64), 3), (3, 3)),
    ]
    jobs[1][1]["images"][4, 0, 0, 0] = torch.nan
    one_has_none, one_fails = in_processes(jobs, tmp_path)
    name, data, sizes = jobs[0]
    alone = JOBS[name](batches_of(data, 0, sum(sizes)))
    assert isinstance(alone, list)
    for together in one_has_none:
        assert together == pytest.approx(alone, abs=1e-6)
    problem = "loader: batch 0: got NaN or infinite values in image 1 of 3 (counted from 0)"
    assert [said.removeprefix("process 1: ").split(";")[0] for said in one_fails] == [problem] * 2


def test_uneven_processes_give_what_one_gives(tmp_path: Path) -> None:
    torch.manual_seed(1)
    jobs: list[Job] = [
        ("accuracy", labelled((21, 2, 1, 6), 6), (20, 1)),
        ("accuracy", labelled((4, 2, 1, 3), 3), (4, 0)),
        ("bottleneck", labelled((13, 3, 64, 64), 3), (4, 9)),
        ("bottleneck", labelled((5, 3, 64, 64), 3), (0, 5)),
    ]
    uneven, empty, bottleneck, empty_too = in_processes(jobs, tmp_path)
    name, data, sizes = jobs[0]
    assert uneven == [JOBS[name](batches_of(data, 0, sum(sizes)))] * 2
    assert empty == empty_too
    assert empty == ["images are needed, but one of the processes has none of them"] * 2
    name, data, sizes = jobs[2]
    alone = JOBS[name](batches_of(data, 0, sum(sizes)))
    assert isinstance(alone, list)
    assert len(alone) == 3
    for together in bottleneck:
        for one, other in zip(alone, together, strict=True):
            assert isinstance(one, SiteBottleneck)
            assert dataclasses.asdict(other) == pytest.approx(dataclasses.asdict(one), abs=1e-6)
