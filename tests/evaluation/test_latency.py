"""Races on networks that are too small to take time: rows, errors, result files."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import ltm
from evaluation_worker import small_vit
from ltm.core.cost import measured_gmacs
from ltm.evaluation import modes
from ltm.evaluation.latency import BASE, Candidate, Conditions, Timing, did_not_run, measure_latency
from ltm.evaluation.modes import TrainingStep, fuse_attention_
from ltm.evaluation.records import describe
from ltm.evaluation.timings import TimingFile
from ltm.methods import MethodConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
QUICK = {"model": "tiny", "image_size": (64, 64), "rounds": 3, "warmup": 1}


class Tiny(nn.Module):
    """The mean colour, said by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.mean((2, 3)))


class Refusing(Tiny):
    def forward(self, images: Tensor) -> Tensor:
        raise RuntimeError("out of memory\nwith a long story")


def candidates(**models: nn.Module) -> list[Candidate]:
    return [Candidate(method=name, model=model, gmacs=1.0) for name, model in models.items()]


def test_every_entrant_gets_a_row_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cheaply = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_cheaply)
    conditions = Conditions(**QUICK, batch_size=2)
    rows = measure_latency(candidates(base=Tiny(), other=Tiny()), conditions, ["eager", "compiled"])
    assert [(row.method, row.mode) for row in rows] == [
        (method, mode) for method in (BASE, "other") for mode in ("eager", "compiled")
    ]
    for row in rows:
        assert row.milliseconds is not None
        assert row.milliseconds > 0
        assert row.images_per_second == pytest.approx(2e3 / row.milliseconds)
        assert row.speedup_interval is not None
        assert row.rounds == 3
        assert row.peak_memory_mib is None  # nothing counts it on a processor
        assert not row.error
    assert all(row.verdict == "the measure" and row.speedup == 1 for row in rows[:2])
    best = min(rows[:2], key=lambda row: row.milliseconds or 0)
    assert best.best_speedup == 1


def test_one_that_fails_does_not_stop_the_others() -> None:
    models = candidates(base=Tiny(), broken=Refusing(), other=Tiny())
    rows = measure_latency(models, Conditions(**QUICK, batch_size=2), ["eager", "cudagraph"])
    by_name = {(row.method, row.mode): row for row in rows}
    assert by_name["broken", "eager"].error == "RuntimeError: out of memory"
    assert by_name["broken", "eager"].verdict == "did not run"
    assert by_name["broken", "eager"].milliseconds is None
    assert "needs a CUDA device" in by_name[BASE, "cudagraph"].error
    assert by_name["other", "eager"].milliseconds


def test_noise_has_the_channels_that_the_network_takes() -> None:
    grey = timm.create_model("vit_tiny_patch16_224", in_chans=1, img_size=64, depth=1)
    (row,) = measure_latency(candidates(base=grey), Conditions(**QUICK, batch_size=2))
    assert not row.error


class Wrapping(Tiny):
    """Fails as torch's ONNX exporter does: advice in colours around the cause."""

    def forward(self, images: Tensor) -> Tensor:
        cause = NotImplementedError("\x1b[1;31mno function\x1b[0m for aten.sort\nand so on")
        raise RuntimeError("Failed. \x1b[96mThis is step 3/3\x1b[0m of exporting") from cause


class Explaining(Tiny):
    def forward(self, images: Tensor) -> Tensor:
        raise ValueError("it cannot be captured") from RuntimeError("cudaErrorWhatever")


def test_a_row_names_the_cause_in_one_plain_line() -> None:
    models = candidates(base=Tiny(), wrapping=Wrapping(), explaining=Explaining())
    _, wrapping, explaining = measure_latency(models, Conditions(**QUICK, batch_size=2))
    assert wrapping.error == "NotImplementedError: no function for aten.sort"
    assert explaining.error == "it cannot be captured"


def test_a_race_leaves_the_networks_alone() -> None:
    model = small_vit()
    ltm.merge_tokens_(model, ltm.ToMe(counts=(13, 11, 9)))
    before = copy.deepcopy(model.state_dict())
    for scope in ("model", "training"):
        conditions = Conditions(**QUICK, batch_size=2, dtype="bf16", scope=scope)
        rows = measure_latency(candidates(base=small_vit(), tome=model), conditions)
        assert all(row.milliseconds for row in rows), rows
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == before[name].dtype


def test_end_to_end_goes_through_the_loader() -> None:
    loader = [(torch.randn(2, 3, 64, 64), torch.zeros(2)) for _ in range(3)]
    conditions = Conditions(**QUICK, batch_size=2, scope="end-to-end")
    rows = measure_latency(candidates(base=Tiny(), other=Tiny()), conditions, loader=loader)
    assert all(row.milliseconds for row in rows)
    with pytest.raises(ValueError, match="needed for scope end-to-end"):
        measure_latency(candidates(base=Tiny()), conditions)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"candidates": candidates(other=Tiny())}, "one of them must be 'base'"),
        ({"modes": ["fast"]}, "mode is fast: it must be one of eager"),
        ({"images": torch.zeros(3, 3, 64, 64)}, "got 3; the batch size is 2"),
    ],
)
def test_bad_races_are_refused(change: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"candidates": candidates(base=Tiny()), "modes": ["eager"]}
    with pytest.raises(ValueError, match=sentence):
        measure_latency(conditions=Conditions(**QUICK, batch_size=2), **{**good, **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"dtype": "int8"}, "dtype is int8"), ({"batch_size": 0}, "batch_size is 0")],
)
def test_bad_conditions_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Conditions(**{**QUICK, "batch_size": 1, **change})


def small_swin() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, depths=(2,), num_heads=(2,)
    ).eval()


def test_swin_gets_fused_attention_and_says_the_same() -> None:
    swin = small_swin()
    images = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        plain = swin(images)
        assert fuse_attention_(swin) == 2
        assert all(m.fused_attn for m in swin.modules() if hasattr(m, "fused_attn"))
        torch.testing.assert_close(swin(images), plain, atol=1e-5, rtol=1e-4)


def test_a_training_step_moves_what_learns() -> None:
    model = Tiny()
    model.linear.bias.requires_grad_(False)
    weight, bias = model.linear.weight.clone(), model.linear.bias.clone()
    step = TrainingStep(model, 5, torch.float32)
    step.optimizer.param_groups[0]["lr"] = 1.0
    assert torch.isfinite(step(torch.randn(4, 3, 8, 8)))
    assert not torch.equal(model.linear.weight, weight)
    assert torch.equal(model.linear.bias, bias)


@pytest.mark.parametrize(
    "config", [None, ltm.LTM(ratio=0.9), ltm.ToMe(ratio=0.9)], ids=["base", "ltm", "tome"]
)
def test_onnxruntime_says_what_torch_says(
    config: MethodConfig | None, unchecked_shapes: None
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = small_vit()
    images = torch.randn(2, 3, 64, 64)
    if config is not None:
        ltm.merge_tokens_(model, config)
        if isinstance(config, ltm.LTM):
            ltm.collect_statistics_(model, [images])
        ltm.freeze_(model)
    run = modes.onnxruntime(model, images)
    with torch.no_grad():
        torch.testing.assert_close(run(images), model(images), atol=1e-4, rtol=1e-4)


def test_onnxruntime_takes_networks_with_fused_attention_and_leaves_it_on(
    unchecked_shapes: None,
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    swin, images = small_swin(), torch.randn(2, 3, 56, 56)
    fuse_attention_(swin)
    run = modes.onnxruntime(swin, images)
    assert all(m.fused_attn for m in swin.modules() if hasattr(m, "fused_attn"))
    with torch.no_grad():
        torch.testing.assert_close(run(images), swin(images), atol=1e-4, rtol=1e-4)


def test_measured_macs_are_those_of_the_counter() -> None:
    images = torch.randn(2, 3, 64, 64)
    for config in (None, ltm.ToMe(counts=(13, 11, 9)), ltm.LTM(counts=(10,), sites=(1,))):
        model = small_vit()
        if config is not None:
            ltm.merge_tokens_(model, config)
        if isinstance(config, ltm.LTM):
            ltm.collect_statistics_(model, [images])  # until then its weights rest
        assert measured_gmacs(model, images) == pytest.approx(ltm.gmacs(model))
    model = small_vit()
    ltm.merge_tokens_(model, ltm.LTMP(counts=(13, 11, 9), merge_threshold=1.1))
    nothing_left = measured_gmacs(model, images)
    for merger in (module for name, module in model.named_modules() if name.endswith("merger")):
        merger.get_parameter("merge_threshold").data.fill_(-1.1)
    assert measured_gmacs(model, images) < nothing_left


def row(**change: Any) -> Timing:
    conditions = Conditions(**QUICK, batch_size=2)
    base = did_not_run(BASE, None, conditions, ["eager"], "")[0]
    times = {"milliseconds": 2.0, "quartiles": (1.9, 2.1), "images_per_second": 1000.0}
    return dataclasses.replace(base, **{"error": "", **times, **change})


def test_result_files_gather_runs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    environment = describe(CPU)
    first = TimingFile(path)
    second = TimingFile(path)
    for file in (first, second):  # at the same time
        file.start_run(environment, {"ratio": 0.7})
    first.add([row(gmacs=2.0)])
    faster = row(
        method="ltm",
        ratio=0.7,
        gmacs=1.4,
        speedup=1.3,
        speedup_interval=(1.2, 1.4),
        best_speedup=1.1,
        best_speedup_interval=(1.0, 1.2),
        verdict="1.30x",
        note="a | b",
    )
    second.add([row(gmacs=2.0), faster, row(method="tofu", milliseconds=None, error="too small")])
    first.add([row(method="tome")])
    content = json.loads(path.read_text())
    assert [found["run"] for found in content["runs"]] == [1, 2]
    assert [found["run"] for found in content["rows"]] == [1, 2, 2, 2, 1]
    assert [found["method"] for found in content["rows"]] == [BASE, BASE, "ltm", "tofu", "tome"]
    third = TimingFile(path)
    assert third.holds(faster, environment.device)
    assert not third.holds(faster, "another machine")
    assert not third.holds(dataclasses.replace(faster, batch_size=3), environment.device)
    table = third.markdown()
    assert "### tiny at 64x64, fp32, model" in table
    assert "| 2 | eager | ltm 0.7 | 0.700 | 2 (1.9-2.1) | 1000 | 1.30 (1.20-1.40) |" in table
    assert "1.30x" in table
    assert "a / b" in table
    assert "did not run: too small" in table
    assert f"- Runs 1 to 2: {environment.device}" in table
    assert not list(tmp_path.glob("*.partial"))
    fourth = TimingFile(path, keep=False)
    assert json.loads(path.read_text()) == content  # until there is something to write
    fourth.start_run(environment, {})
    fourth.add([faster])
    assert len(json.loads(path.read_text())["rows"]) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": []}'])
def test_other_files_are_not_added_to(content: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no timings that could be added to"):
        TimingFile(path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    """What only a GPU can show."""

    def test_what_waits_for_the_processor_is_refused_and_others_go_on(self) -> None:
        ltmp = small_vit()
        ltm.merge_tokens_(ltmp, ltm.LTMP(ratio=0.9, merge_threshold=0.5))
        conditions = Conditions(**QUICK, batch_size=4, device="cuda", dtype="fp16")
        rows = measure_latency(
            candidates(base=small_vit(), ltmp=ltmp), conditions, ["eager", "cudagraph"]
        )
        by_name = {(row.method, row.mode): row for row in rows}
        assert "cannot be captured" in by_name["ltmp", "cudagraph"].error
        assert by_name["ltmp", "eager"].milliseconds
        captured = by_name[BASE, "cudagraph"]
        assert captured.milliseconds
        assert captured.peak_memory_mib
