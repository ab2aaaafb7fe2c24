"""The Triton kernels give what the plain path gives: on a GPU, or in Triton's interpreter."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from timm.layers.attention import Attention

from ltm.core import attention as attention_step
from ltm.kernels import dispatch

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def found():
    pytest.importorskip("triton", reason="Triton is for Linux")
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    gpu = torch.cuda.is_available()
    env = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    parts = min(14, os.cpu_count() or 1) if gpu else 1  # kernels are compiled one core each

    def run(part):
        return subprocess.run(
            [sys.executable, str(TESTS / "kernels_worker.py"), str(part), str(parts)],
            env=env if gpu else env | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    found = {}
    with ThreadPoolExecutor(parts) as pool:
        for done in pool.map(run, range(parts)):
            assert done.returncode == 0, done.stderr
            for section, of in json.loads(done.stdout).items():
                found.setdefault(section, {}).update(of)
    return found


@pytest.mark.slow
def test_decisions_are_the_same_and_weights_and_merged_tokens_agree(found):
    for name, case in found["kernels"].items():
        # Which of the tokens that are not there leaves is anybody's choice.
        assert case["leaves"] or name == "hardly anything there", name
        assert case["assignment"] or name == "hardly anything there", name
        assert case["merged True"] < 1e-5, name
        assert case.get("merged False", 0) < 1e-5, name
        assert case["sizes"] == 0, name
        assert case["handed on"] < 1e-5, name
        assert case.get("without values", True), name
        assert case["unattended"] == 0, name
        assert case["weights"] < 1e-5, name
    assert {"merged False", "without values"} <= found["kernels"]["plain"].keys()


@pytest.mark.slow
def test_many_images_in_half_precision_are_decided_alike_every_time(found):
    if "repeated" not in found:
        pytest.skip("no CUDA device")
    same, right = found["repeated"]["128"]
    assert same
    assert right > 0.98  # a token that leaves earlier or later moves the places after it


@pytest.mark.slow
def test_sequences_of_any_length_are_matched_as_in_torch(found):
    for case, (leaves, targets) in found["long"].items():
        assert min(leaves, targets) > 0.995, case


@pytest.mark.slow
def test_attention_and_importance_agree(found):
    for num_tokens, (attention, importance) in found["attention"].items():
        assert attention < 1e-5, num_tokens
        assert importance < 1e-5, num_tokens
    for case, (attention, _) in found["attention in half"].items():
        assert attention < 5e-3, case


@pytest.mark.slow
def test_rotary_positions_agree(found):
    assert max(found["turned"].values()) < 1e-5
    for name, (difference, _, cost) in found["rotary"].items():
        assert difference < 1e-5, name
        assert 0.8 < cost < 1.02, name


@pytest.mark.slow
def test_informative_steps_agree(found):
    for case, (logits, weights) in found["inform"].items():
        assert max(logits, weights) < 1e-3, case
    assert max(found["inform half"]["few"]) < 0.02  # of logits that are one on average
    assert max(found["inform half"]["many"]) < 0.1  # products in half precision
    for case, (same, weights, logits) in found["placed"].items():
        assert same, case
        assert max(weights, logits) < 1e-5, case


@pytest.mark.slow
def test_constant_masks_agree(found):
    assert len(found["gathered"]) == 4
    for case, difference in found["gathered"].items():
        assert difference < (1e-3 if "float16" in case else 1e-6), case


@pytest.mark.slow
def test_tokens_with_much_in_common_are_decided_alike(found):
    assert min(found["decided"].values()) > 0.99


@pytest.mark.slow
def test_nothing_joins_a_token_that_is_not_finite(found):
    """In 0.1.0 all tokens that left such an image joined one, on the plain path."""
    assert found["poisoned"] == {value: [True, 0, 0, False] for value in ("nan", "inf")}


@pytest.mark.slow
def test_grids_agree(found):
    assert max(found["grids"].values()) < 1e-5
    assert max(found["grids in half"].values()) < 1e-2
    assert len(found["families"]) == 6
    for name, (difference, _, cost) in found["families"].items():
        assert difference < 1e-4, name
        assert 0.8 < cost < 1.02, name


@pytest.mark.slow
def test_networks_agree(found):
    kinds = {"default", "static", "frozen", "informative", "operators", "unimportant"}
    assert set(found["models"]) == kinds
    for name, (difference, _, cost) in found["models"].items():
        assert difference < 1e-5, name
        assert 0.8 < cost < 1.02, name
    for name, (difference, plain, _) in found.get("half", {}).items():
        # Rounding alone can change who leaves: then the plain path differs as much.
        assert difference < max(1e-2, 1.5 * plain), name
    for name, difference in found.get("captured", {}).items():
        assert difference < 1e-5, name


@pytest.mark.slow
def test_what_trains_on_a_frozen_network_has_the_gradients_of_the_plain_path(found):
    for name, (ours, plain) in found["learns"].items():
        assert len(plain) > 1, name
        assert all(gradient != 0 for gradient in plain[:-1]), name
        assert ours == pytest.approx(plain, rel=1e-3, abs=1e-7), name


def test_they_are_for_inference_on_a_gpu():
    tokens = torch.zeros(1, 9, 4)
    before = dispatch.enable()
    try:
        assert not dispatch.uses_triton(tokens)
    finally:
        dispatch.enable(before)


def test_wide_networks_have_their_importance_from_a_kernel(monkeypatch, unchecked_shapes):
    asked = []
    monkeypatch.setattr(dispatch, "_runs_on", lambda _: True)
    monkeypatch.setattr(attention_step, "_importance", lambda *_: asked.append(_) or torch.zeros(1))
    before = dispatch.enable()
    try:
        for num_tokens, num_heads in ((197, 4), (577, 12)):
            assert not asked
            layer, qkv = Attention(768, num_heads).eval(), torch.zeros(1, num_tokens, 3 * 768)
            attention_step.importance(layer, qkv, None, class_token=True)
        assert asked
    finally:
        dispatch.enable(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels can be built")
def test_where_they_cannot_be_built_the_plain_path_is_taken_with_a_warning(monkeypatch):
    capability = {"value": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability["value"])
    dispatch._works_on.cache_clear()
    with pytest.warns(RuntimeWarning, match="LTM_KERNELS=0"):
        assert not dispatch._works_on(0)
    capability["value"] = (6, 1)
    dispatch._works_on.cache_clear()
    assert not dispatch._works_on(0)
    dispatch._works_on.cache_clear()
