"""Nothing that a user loads can run code: weights that are more than tensors are refused."""

import pickle
from pathlib import Path

import pytest
import torch

import ltm
from ltm.cli import main
from ltm.models import ModelSource


class Malicious:
    """Unpickling it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (_leave_trace, (str(self.trace),))


def _leave_trace(path: str) -> dict[str, torch.Tensor]:
    Path(path).write_text("code was run")
    return {}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_the_pickle_is_malicious(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(pickle.dumps(Malicious(trace)))
    pickle.loads((tmp_path / "weights.pth").read_bytes())
    assert trace.exists(), "otherwise the tests below would prove nothing"


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["weights.pth", "weights.pt", "weights.bin", "weights.ckpt"])
def test_weights_that_run_code_are_refused(
    name: str, zipped: bool, tmp_path: Path, trace: Path
) -> None:
    content = {"state_dict": Malicious(trace)}
    if zipped:
        torch.save(content, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match="cannot be read"):
        ModelSource(model="vit_tiny_patch16_224", weights=tmp_path / name).load()
    assert not trace.exists()


def test_a_pickle_by_another_name_is_no_safetensors_file(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Malicious(trace)))
    with pytest.raises(ValueError, match="cannot be read"):
        ModelSource(model="vit_tiny_patch16_224", weights=tmp_path / "model.safetensors").load()
    model = torch.nn.Module()
    with pytest.raises((ValueError, FileNotFoundError)):
        ltm.load(tmp_path, model)
    assert not trace.exists()


def test_a_saved_run_with_a_pickle_is_refused(tmp_path: Path, trace: Path) -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3)
    ltm.merge_tokens_(model, ltm.ToMe(counts=(12,), sites=(4,)))
    ltm.save(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Malicious(trace)))
    with pytest.raises(ValueError, match="damaged weights"):
        ModelSource(run=tmp_path).load()
    assert not trace.exists()


def test_programs_are_not_loaded_by_commands(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(Malicious(trace), tmp_path / "model.pt2")
    image = tmp_path / "image.png"
    image.write_bytes(b"")
    assert main(["predict", str(image), "--onnx", str(tmp_path / "model.pt2")]) == 2
    assert "unpickling" in capsys.readouterr().err
    assert not trace.exists()
