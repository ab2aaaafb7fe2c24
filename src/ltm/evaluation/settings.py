"""Settings of `ltm.evaluate` and `ltm.benchmark`. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ltm.core.validation import require, require_least

Scope = Literal["model", "end-to-end", "training"]


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """What is compared, and on which images."""

    methods: tuple[str, ...] = ()
    """Methods to compare, such as tome,ltm or ltm:support=learned,sites=3,5,8."""
    ratio: float | None = None
    """Share of the multiply-adds to keep; by default 0.7."""
    split: str = "val"
    """Split of the data, where it has several."""
    images: int | None = None
    """Evaluate this many images, spread over the classes, instead of all."""
    statistics: str | None = None
    """Images for the class statistics that LTM's informative weights need, named as in --data.
    Labels are not read. Without statistics LTM weighs tokens by size and attention."""
    bottleneck: bool = True
    """Measure the information bottleneck."""
    beta: float = 10.0
    """Sharpness of the soft class membership."""
    zero_shot: bool = False
    """Score images against prompts of the classes: for hf:NAME of a CLIP or SigLIP, and for
    open_clip:NAME:TAG."""
    class_names: Path | None = None
    """File of class names for the prompts, one a line; by default the data's own."""
    templates: tuple[str, ...] = ("a photo of a {}.",)
    """Prompts, with {} in the place of the class name; a class is the mean of its prompts."""
    batch_size: int = 64
    """Images per batch and process."""
    workers: int = 2
    """Loader processes."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        require_least("images", self.images)
        require_least("batch_size", self.batch_size)
        require_least("workers", self.workers, 0)
        require(0.0 < self.beta < float("inf"), "beta", self.beta, "above 0 and finite")
        prompts = self.class_names is not None or self.templates != EvaluateSettings.templates
        if prompts and not self.zero_shot:
            raise ValueError("--class-names and --templates go with --zero-shot")


def _words(name: str, texts: str | Iterable[int | str]) -> tuple[str, ...]:
    """Words, each of which may hold several with commas between them."""
    texts = (texts,) if isinstance(texts, str) else texts
    found = [part.strip() for part in ",".join(map(str, texts)).split(",") if part.strip()]
    if not found:
        raise ValueError(f"{name}: there is none; give at least one")
    return tuple(found)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"batch_sizes is {text}, but must be a whole number of at least 1")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """What is timed, and how. Lists of words may be written with commas."""

    ratio: float | None = None
    """Share of the multiply-adds to keep; by default 0.7."""
    batch_sizes: tuple[int | str, ...] = (1, 8, 32)
    """Images per batch."""
    modes: tuple[str, ...] = ("eager",)
    """eager, compiled, cudagraph, compiled-cudagraph, onnxruntime."""
    dtypes: tuple[str, ...] = ("fp32",)
    """fp32, fp16, bf16."""
    scopes: tuple[Scope, ...] = ("model",)
    """model (forward alone), end-to-end (with the loader; needs --data), training (a step)."""
    data: str | None = None
    """Images to run on, named as for ltm evaluate; by default noise."""
    split: str = "val"
    """Split of the data, where it has several."""
    workers: int = 2
    """Loader processes for scope end-to-end."""
    rounds: int = 15
    """Rounds of timing; in each, all networks take turns."""
    warmup: int = 3
    """Calls before the first round."""
    channels_last: bool = False
    """Use the channels-last memory layout, which suits convolutions."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of random weights."""
    minutes: float | None = None
    """Start no further comparison after this many minutes."""

    def __post_init__(self) -> None:
        sizes = tuple(_positive(text) for text in _words("batch_sizes", self.batch_sizes))
        object.__setattr__(self, "batch_sizes", sizes)
        for name in ("modes", "dtypes"):
            object.__setattr__(self, name, _words(name, getattr(self, name)))
        _words("scopes", self.scopes)
        require_least("rounds", self.rounds)
        require_least("warmup", self.warmup, 0)
        require_least("minutes", self.minutes, 0)
        if "end-to-end" in self.scopes and self.data is None:
            raise ValueError("scope end-to-end needs images: give --data")
