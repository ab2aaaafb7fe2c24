"""The examples run as they are, offline."""

import json
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples"


def run(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of third parties, which users see too
        return runpy.run_path(str(FOLDER / f"{name}.py"))["main"]()


def test_a_loaded_network_of_transformers_answers_as_the_saved_one() -> None:
    assert run("hugging_face") < 1e-5


def test_a_training_loop_of_ones_own_learns() -> None:
    assert run("training_loop") > 0.8


def test_maps_of_a_merging_backbone_have_the_sizes_of_their_strides() -> None:
    assert [shape[-1] for shape in run("detection_backbone")] == [64, 32, 16, 8, 4]


@pytest.mark.slow
def test_onnx_runtime_runs_the_file(unchecked_shapes: None) -> None:
    assert run("onnx_file") == (3, 20)


def test_a_clip_classifies() -> None:
    assert run("clip_zero_shot").shape == (4, 3)


def test_every_cell_of_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((FOLDER / "timm_network.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell.get("outputs"), "commit the notebook without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)
    assert "GMACs" in capsys.readouterr().out


def test_every_example_is_tested() -> None:
    tested = (
        Path(__file__).read_text()
        + (Path(__file__).parent / "adapters" / "test_transformers.py").read_text()
    )
    assert [
        path.name
        for path in FOLDER.iterdir()
        if path.suffix in (".py", ".ipynb") and path.stem not in tested
    ] == []
