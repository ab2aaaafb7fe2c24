"""Two processes with uneven shares give what one process gives."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evaluation_worker import JOBS, Job, batches_of, in_processes
from ltm.evaluation.bottleneck import SiteBottleneck

pytestmark = pytest.mark.slow


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ltm.processes import local_device  # 0.1.0 has no such module

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device is cuda:9, but the CUDA devices are cuda:0 to cu"):
        local_device("cuda:9")


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
    assert empty == ["one of the processes has no images"] * 2
    name, data, sizes = jobs[2]
    alone = JOBS[name](batches_of(data, 0, sum(sizes)))
    assert isinstance(alone, list)
    assert len(alone) == 3
    for together in bottleneck:
        for one, other in zip(alone, together, strict=True):
            assert isinstance(one, SiteBottleneck)
            assert dataclasses.asdict(other) == pytest.approx(dataclasses.asdict(one), abs=1e-6)
