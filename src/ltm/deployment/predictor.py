"""`ltm.BatchPredictor`: from a batch of images to a batch of embeddings, scores or classes.

Ray Data, Dask, Spark and `datasets` can run it; `ltm.embed` and `ltm.predict` do. The network takes
8-bit images, which are normalised on its device, and runs as a CUDA graph on a GPU.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ltm.api import capture, conversion_of, freeze_, is_merging
from ltm.core.validation import require_least
from ltm.data.reading import Preparation, decoded, sentence
from ltm.data.transforms import ImageSpec
from ltm.deployment.formats import onnx_information
from ltm.deployment.information import ModelInformation, known_about
from ltm.deployment.settings import Dtype, InputSettings
from ltm.evaluation.modes import OnnxModel, use_fast_paths_
from ltm.models import Network, Say, name_of, open_model, silent, source_of
from ltm.processes import local_device

Output = Literal["embedding", "logits", "top5"]
OUTPUTS: tuple[Output, ...] = get_args(Output)
NOT_FINITE = "the model's scores are NaN or infinite"


class Outcome(NamedTuple):
    """The outputs for a batch; None for those that were not asked for."""

    embedding: Tensor | None = None
    logits: Tensor | None = None
    indices: Tensor | None = None
    probabilities: Tensor | None = None


def likeliest(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The classes of the highest scores, or all if there are fewer, and their probabilities."""
    best = scores.float().softmax(dim=-1).topk(min(top, scores.shape[-1]))
    return best.indices, best.values


class _Pixels(nn.Module):
    """8-bit images as a network expects them."""

    mean: Tensor
    std: Tensor

    def __init__(self, spec: ImageSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        mean, std = (
            255.0 * torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std)
        )
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return ((images.float() - self.mean) / self.std).to(self.dtype)


class _Network(nn.Module):
    """A network that gives embeddings, scores, or both from one pass; a file gives scores."""

    def __init__(self, network: nn.Module, outputs: Sequence[str]) -> None:
        super().__init__()
        self.network: Any = network
        self.embeds, self.scores = "embedding" in outputs, {"logits", "top5"} & set(outputs)

    def forward(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not self.embeds:
            return None, self.network(images)
        features = self.network.forward_features(images)
        embedding = self.network.forward_head(features, pre_logits=True)
        return embedding, self.network.forward_head(features) if self.scores else None


class _Run(nn.Module):
    """From 8-bit images to an outcome, all of it on the device."""

    def __init__(
        self, pixels: _Pixels, network: nn.Module, outputs: Sequence[str], top: int
    ) -> None:
        super().__init__()
        self.pixels, self.network, self.outputs, self.top = pixels, network, outputs, top

    def forward(self, images: Tensor) -> Outcome:
        embedding, logits = self.network(self.pixels(images))
        half = None if embedding is None else embedding.half()
        best = (None, None) if "top5" not in self.outputs else likeliest(logits, self.top)
        return Outcome(half, logits.float() if "logits" in self.outputs else None, *best)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A network or an ONNX file, ready to run on batches of 8-bit images."""

    run: Callable[[Tensor], Outcome]
    information: ModelInformation
    device: torch.device
    outputs: Sequence[Output]
    identity: str
    """A digest of its weights."""


class BatchPredictor:
    """A function from a batch of images to a batch of answers, for frameworks that map batches.

    A batch is a dict of columns of equal length, as Ray Data and `datasets` hand over. The images
    are bytes of image files, 8-bit pixels, Pillow images, or `datasets`' dicts with bytes; an array
    of the network's size is taken as it is, anything else is resized and cropped as the saved
    folder says. The answer has the other columns, and

    - `embedding` (n, channels), float16, for `output="embedding"`: what the head would get;
    - `logits` (n, classes), float32, for `"logits"`;
    - `classes`, `indices` and `probabilities` (n, top) for `"top5"`, the likeliest first;
    - `error`, None or why there is no answer; numbers are NaN then, and indices -1.

    A network without a head gives embeddings only. The predictor can be pickled; the network is
    loaded by the process that first calls it.

    Args:
        model: a folder that ltm saved, an .onnx file of `ltm.export`, a timm name, a `ModelSource`
            or a network.
        output: what to give, one or several.
        device: auto, cpu, cuda or cuda:N.
        dtype: of the network; auto is float16 on a GPU and float32 elsewhere.
        batch_size: images that the network takes at once; larger batches are cut.
        top: how many classes "top5" gives.
        compile: compile the network first, which takes a minute and saves some time.
        image_column: the column of the images; it is left out of the answer.
        inputs: class names and crop, where they are not the network's own.
    """

    def __init__(
        self,
        model: Network,
        output: Output | Sequence[Output] = "embedding",
        *,
        device: str = "auto",
        dtype: Dtype = "auto",
        batch_size: int = 64,
        top: int = 5,
        compile: bool = False,  # noqa: A002 - torch's word
        image_column: str = "image",
        inputs: InputSettings = InputSettings(),
    ) -> None:
        outputs = (output,) if isinstance(output, str) else tuple(output)
        for name in outputs:
            if name not in OUTPUTS:
                raise ValueError(f"output is {name!r}; choose from {', '.join(OUTPUTS)}")
        if dtype not in get_args(Dtype):
            raise ValueError(f"dtype is {dtype!r}; choose from {', '.join(get_args(Dtype))}")
        require_least("batch_size", batch_size)
        require_least("top", top)
        here = isinstance(model, str | Path) and Path(model).exists()
        self.model: Any = Path(model).absolute() if here else model  # type: ignore[arg-type]
        self.outputs, self.device = outputs, device
        self.dtype: Dtype = dtype
        self.batch_size, self.top, self.compile = batch_size, top, compile
        self.image_column, self.inputs = image_column, inputs
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"BatchPredictor({name_of(self.model)}, {' and '.join(self.outputs)})"

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The answers for a batch."""
        with self._lock:  # a CUDA graph has one input, whoever fills it
            return self.submit(batch).result()

    @property
    def is_file(self) -> bool:
        """Whether the network is an ONNX file."""
        return isinstance(self.model, Path | str) and Path(self.model).suffix.lower() == ".onnx"

    @property
    def loaded(self) -> Loaded:
        """The network, loaded when it is first asked for."""
        return self.load()

    def load(self, say: Say = silent) -> Loaded:
        """Load the network unless it is loaded; `say` is told where its weights come from."""
        if self._loaded is None:
            self._loaded = self._load(say)
        return self._loaded

    def on(self, device: str) -> Self:
        """The same predictor for another device, not loaded yet."""
        other = copy.copy(self)
        other.device = device
        return other

    def unload(self) -> None:
        """Free the network; the next call loads it again."""
        self._loaded = None

    def submit(self, batch: Mapping[str, Any]) -> Pending:
        """Start on a batch; a GPU works on it while the next one is read."""
        loaded = self.loaded
        pixels, errors = self._pixels(batch)
        outcomes = []
        for piece in pixels.split(self.batch_size):
            outcome = loaded.run(piece.to(loaded.device, non_blocking=True))
            values = (None if v is None else v.to("cpu", non_blocking=True) for v in outcome)
            outcomes.append(Outcome(*values))
        kept = {n: v for n, v in batch.items() if n not in (self.image_column, "error")}
        return Pending(kept, errors, outcomes, loaded, pixels)

    def _pixels(self, batch: Mapping[str, Any]) -> tuple[Tensor, list[str | None]]:
        if self.image_column not in batch:
            raise ValueError(
                f"batch has no column {self.image_column!r} among {', '.join(map(str, batch))}"
            )
        contents, size = batch[self.image_column], self.loaded.information.spec.size
        known = batch.get("error", [None] * len(contents))
        errors: list[str | None] = [error or None for error in known]
        shape = tuple(getattr(contents, "shape", (0,))[1:])
        if shape in ((3, *size), (*size, 3)):
            ready = (
                contents
                if isinstance(contents, Tensor)
                else torch.from_numpy(np.ascontiguousarray(contents))
            )
            if ready.dtype == torch.uint8:
                return ready if shape == (3, *size) else ready.permute(0, 3, 1, 2), errors
        prepare = Preparation(self.loaded.information.spec)
        pixels = torch.zeros(len(contents), 3, *size, dtype=torch.uint8)
        for number, content in enumerate(contents):
            try:
                if errors[number] is None:
                    pixels[number] = prepare(decoded(content, f"image {number}"))
            except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged bytes
                errors[number] = sentence(error)
        return pixels, errors

    def _load(self, say: Say) -> Loaded:
        if self.is_file:
            return self._load_file(Path(self.model))
        device = local_device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        network: Any = open_model(self.model, device, say=say)
        source = source_of(self.model)
        information = known_about(network, self.inputs, run=None if source is None else source.run)
        number = int(getattr(network, "num_classes", 0) or 0)
        if "embedding" in self.outputs and not hasattr(network, "forward_head"):
            raise ValueError(
                f"model: {type(network).__name__} has no forward_head, so it gives no embedding; "
                "take a network of timm"
            )
        outputs: tuple[Output, ...] = self.outputs if number else ("embedding",)
        if not set(outputs) <= set(self.outputs):
            raise ValueError("model: it has no classes to predict; take one with a head")
        identity = _digest(network)
        if is_merging(network):
            freeze_(network)
            conversion_of(network).state.has_warned = True  # its own head takes the features
        dtype = _dtype(self.dtype, device)
        if device.type == "cuda":
            use_fast_paths_(network)
        ready: Any = _Network(network.to(dtype).eval().requires_grad_(False), outputs)
        if self.compile:
            ready = torch.compile(ready, dynamic=device.type != "cuda")
        run: Any = _Run(_Pixels(information.spec, dtype), ready, outputs, self.top)
        run = _captured(run.to(device).eval(), information.spec, self.batch_size, device)
        return Loaded(run, information, device, outputs, identity)

    def _load_file(self, path: Path) -> Loaded:
        if "embedding" in self.outputs:
            raise ValueError(
                f"output is embedding, but {path} gives scores: take the network it was exported "
                "from, or logits"
            )
        device = "cpu" if self.device == "auto" else self.device
        if device.startswith("cuda") and torch.cuda.is_available():
            device = str(local_device(device))  # of this process
        file = OnnxModel(path, device=device)
        information = onnx_information(file).adjusted(file.num_classes, self.inputs)
        pixels = _Pixels(information.spec, torch.float32)
        run = torch.inference_mode()(
            _Run(pixels, _Network(file, self.outputs), self.outputs, self.top)
        )
        identity = hashlib.sha256(path.read_bytes()).hexdigest()
        cpu = torch.device("cpu")  # ONNX Runtime copies images to its device by itself
        return Loaded(run, information, cpu, self.outputs, identity)


class Pending:
    """A batch that a device works on."""

    def __init__(
        self,
        kept: dict[str, Any],
        errors: list[str | None],
        outcomes: list[Outcome],
        loaded: Loaded,
        pixels: Tensor,
    ) -> None:
        self._kept, self._errors, self._outcomes = kept, errors, outcomes
        self._class_names = loaded.information.class_names
        self._pixels = pixels  # being copied
        self._done: torch.cuda.Event | None = None
        if loaded.device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(loaded.device))

    def result(self) -> dict[str, Any]:
        """Wait for the answers."""
        if self._done is not None:
            self._done.synchronize()
        found: dict[str, np.ndarray] = {}
        for name in Outcome._fields:
            values = [value for o in self._outcomes if (value := getattr(o, name)) is not None]
            if values:
                found[name] = torch.cat(values).numpy()
        self._leave_out(found)
        if "indices" in found:
            found["classes"] = self._named(found["indices"])
        errors = np.empty(len(self._errors), dtype=object)
        errors[:] = self._errors
        return {**self._kept, **found, "error": errors}

    def _leave_out(self, found: dict[str, np.ndarray]) -> None:
        """Remove numbers that are not finite, and those of images that could not be read."""
        for values in (found[n] for n in ("embedding", "logits", "probabilities") if n in found):
            for row in np.flatnonzero(~np.isfinite(values).all(axis=1)):
                self._errors[row] = self._errors[row] or NOT_FINITE
        wrong = [row for row, error in enumerate(self._errors) if error is not None]
        for name in found if wrong else ():
            found[name][wrong] = -1 if name == "indices" else np.nan

    def _named(self, indices: np.ndarray) -> np.ndarray:
        names = self._class_names
        table = np.array(
            [str(i) for i in range(indices.max(initial=0) + 1)] if names is None else names
        )
        named = table.astype(object)[indices]
        named[indices < 0] = ""
        return named


def _captured(
    run: nn.Module, spec: ImageSpec, batch_size: int, device: torch.device
) -> Callable[[Tensor], Outcome]:
    """As a CUDA graph if possible; networks whose token counts vary run as they are."""
    alone = torch.inference_mode()(run)
    if device.type != "cuda":
        return alone
    try:
        images = torch.zeros(batch_size, 3, *spec.size, dtype=torch.uint8, device=device)
        return capture(run, images)
    except ValueError:
        return alone


def _dtype(name: Dtype, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _digest(network: nn.Module) -> str:
    """A digest of all weights: it tells networks of the same name apart."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
