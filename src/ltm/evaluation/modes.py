"""Modes of running a network: eager, compiled, CUDA graph, ONNX Runtime; and a training step.

A mode makes a runner, which is called on batches of images. A CUDA graph and the ONNX file of
`onnxruntime` take only batches of the size that they were made for.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from ltm.api.graphs import Captured
from ltm.core.patches import embed_by_product_
from ltm.extras import require

Runner = Callable[[Tensor], Any]
Mode = Callable[[nn.Module, Tensor], Runner]
"""Prepares a network for batches like the one given."""


def eager(model: Runner, _images: Tensor) -> Runner:
    """The network as it is, without gradients."""

    def run(images: Tensor) -> Any:
        with torch.no_grad():
            return model(images)

    return run


def compiled(model: nn.Module, images: Tensor) -> Runner:
    """`torch.compile`, the whole graph, for this batch size."""
    run = eager(torch.compile(model, fullgraph=True, dynamic=False), images)
    run(images)
    return run


def cudagraph(model: nn.Module, images: Tensor) -> Runner:
    """The eager network, captured as a CUDA graph."""
    _require_cuda("cudagraph", images)
    return Captured(eager(model, images), images)


def compiled_cudagraph(model: nn.Module, images: Tensor) -> Runner:
    """The compiled network, captured as a CUDA graph."""
    _require_cuda("compiled-cudagraph", images)
    return Captured(compiled(model, images), images)


def _require_cuda(mode: str, images: Tensor) -> None:
    if images.device.type != "cuda":
        raise ValueError(f"mode {mode} needs a CUDA device")


def onnxruntime(model: nn.Module, images: Tensor) -> Runner:
    """The network as an ONNX file for this batch size, in ONNX Runtime on the processor."""
    if images.device.type != "cpu" or images.dtype != torch.float32:
        raise ValueError("mode onnxruntime is timed on the processor, in fp32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        with torch.no_grad(), _plain_attention(model):
            program = torch.export.export(model, (images,))
        to_onnx(program).save(str(path))
        return OnnxModel(path)


_PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""Which providers run an ONNX file on a device; each leaves what it cannot run to the next."""


class OnnxModel(nn.Module):
    """An ONNX file in ONNX Runtime: scores from images. It stands where a network may stand.

    Args:
        path: the file.
        threads: of the processor; torch's number unless given.
        device: cpu, cuda, cuda:N or tensorrt.
    """

    def __init__(self, path: Path, *, threads: int | None = None, device: str = "cpu") -> None:
        super().__init__()
        if not path.is_file():
            raise FileNotFoundError(f"model is {path}: there is no such file")
        runtime = require("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3
        # Otherwise its threads spin between two calls, and slow down what runs then.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        providers = onnx_providers(device)
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=providers)
            self._input = self._session.get_inputs()[0].name
        except Exception as error:  # its own exceptions have no common base
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is not an ONNX model that can be run: {reason}") from error
        wanted = providers[0][0]
        if self._session.get_providers()[0] != wanted:  # it falls back with a mere warning
            raise ValueError(f"device: {device} cannot be used: {wanted} did not start")
        self.path = path

    @property
    def num_classes(self) -> int:
        """The number of scores, of a file that `ltm export` wrote."""
        return int(self._session.get_outputs()[0].shape[-1])

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says about itself."""
        return self._session.get_modelmeta().custom_metadata_map

    def forward(self, images: Tensor) -> Tensor:
        outputs: Any = self._session.run(None, {self._input: images.float().cpu().numpy()})
        return torch.from_numpy(outputs[0]).to(images.device)


def onnx_providers(device: str) -> list[tuple[str, dict[str, int]]]:
    """The providers of a device, if this build of ONNX Runtime has them."""
    kind, _, index = device.partition(":")
    if kind not in _PROVIDERS or (index and not index.isdecimal()):
        raise ValueError(f"device: got {device!r}; an ONNX file runs on {', '.join(_PROVIDERS)}")
    runtime = require("onnxruntime")
    here: list[str] = runtime.get_available_providers()
    wanted = _PROVIDERS[kind]
    if wanted[0] not in here:
        raise ValueError(
            f"device: {device} needs {wanted[0]}, and this onnxruntime has {', '.join(here)}: "
            "pip install 'ltm[onnx-gpu]' in place of onnxruntime, or use --device cpu"
        )
    options = {"device_id": int(index or 0)}
    return [(name, {} if name.startswith("CPU") else options) for name in wanted if name in here]


def to_onnx(
    program: ExportedProgram,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> torch.onnx.ONNXProgram:
    """A traced network as an ONNX program in memory; onnx and onnxscript must be installed."""
    with warnings.catch_warnings():
        # The exporter warns of its own deprecations.
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=input_names,
            output_names=output_names,
        )
    assert exported is not None
    return exported


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Switch fused attention off: ONNX has none, and torch cannot translate Swin's."""
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "fused_attn", False)]
    for layer in layers:
        layer.fused_attn = False
    try:
        yield
    finally:
        for layer in layers:
            layer.fused_attn = True


MODES: dict[str, Mode] = {
    "eager": eager,
    "compiled": compiled,
    "cudagraph": cudagraph,
    "compiled-cudagraph": compiled_cudagraph,
    "onnxruntime": onnxruntime,
}
"""Ways to run a forward, by name."""

TITLES = {
    "eager": "PyTorch",
    "compiled": "torch.compile",
    "cudagraph": "CUDA graph",
    "compiled-cudagraph": "compiled CUDA graph",
    "onnxruntime": "ONNX Runtime",
}
"""What people call them."""


def usual_modes(device: torch.device) -> tuple[str, ...]:
    """The modes that are quick to prepare here; compiling takes minutes, so it is left out."""
    if device.type == "cuda":
        return "eager", "cudagraph"
    packages = ("onnx", "onnxscript", "onnxruntime")
    has_onnx = all(find_spec(package) is not None for package in packages)
    return ("eager", "onnxruntime") if has_onnx else ("eager",)


class TrainingStep:
    """Forward, cross-entropy, backward and a step of SGD on everything that learns.

    Half precision is autocast over float32 weights, as in training.
    """

    def __init__(self, model: nn.Module, num_classes: int, dtype: torch.dtype) -> None:
        self.model = model.train()
        self.num_classes, self.dtype = num_classes, dtype
        learning = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(learning, lr=1e-6, momentum=0.9)

    def __call__(self, images: Tensor) -> Tensor:
        labels = torch.arange(len(images), device=images.device) % self.num_classes
        half = self.dtype != torch.float32
        with torch.autocast(images.device.type, self.dtype, enabled=half):
            loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def peak_memory_mib(run: Runner, model: nn.Module, images: Tensor) -> float | None:
    """Peak memory of a run, with the weights; None on a processor, where nothing counts it."""
    if images.device.type != "cuda":
        return None
    device = images.device
    run(images)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run(images)
    torch.cuda.synchronize(device)
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    return (torch.cuda.max_memory_allocated(device) - before + weights) / 2**20


def fuse_attention_(model: nn.Module) -> int:
    """Switch fused attention on wherever timm has it; by default Swin does not use it.

    Returns how many attention layers have it.
    """
    found = 0
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = True
            found += 1
    return found


def use_fast_paths_(model: nn.Module) -> None:
    """Switch on what makes any network faster, the original too."""
    fuse_attention_(model)
    embed_by_product_(model)
