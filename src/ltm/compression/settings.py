"""Settings of `ltm.compress`. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ltm.core.validation import require, require_least
from ltm.training.recipes import distilling
from ltm.training.settings import Length

_ALLOWED_LOSS = 0.5
LEAST_RATIO = 0.4
"""A bisection for max_loss tries ratios between this and 1."""
NUM_POINTS = 4
"""How many ratios it tries."""


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """How to merge, what to choose on images, and what to measure."""

    method: str = "ltm"
    """How to merge, such as ltm or ltm:support=learned,sites=3,5,8."""
    ratio: float = 0.7
    """Share of the multiply-adds to keep."""
    ratios: tuple[float, ...] = ()
    """Try these ratios, and keep the fastest network within --max-loss."""
    max_loss: float | None = None
    """Keep the fastest network that loses at most this many points of top-1 (on images without
    labels: of agreement with the original). Tries --ratios, or without them four ratios between 0.4
    and 1, by bisection. With --ratios alone it is 0.5."""
    speedup: float | None = None
    """Instead of a ratio: the speed-up to reach, in the form to deploy."""
    budget_ms: float | None = None
    """Instead of a ratio: milliseconds that a batch may take, in the form to deploy."""
    compare: tuple[str, ...] = ()
    """Other methods to compare with, such as tome,tofu,ltmp."""
    calibrate: bool = True
    """Choose on unlabelled images where to merge and how much, if network and data allow it."""
    calibration_images: int = 256
    """Images set aside for calibration; they are not evaluated. 0 for none."""
    calibration_trials: int = 200
    """Schedules to try in all; Ctrl-C keeps the best so far."""
    finetune_epochs: int = 0
    """Epochs of training the mask modules, on the labelled images of the training split."""
    tune: str | None = None
    """How long to tune the network by distillation from the original, on unlabelled images: 60s, 5m
    or "3 epochs". If that does not help on images set aside, the untuned network is kept."""
    tune_data: str | None = None
    """Images to tune on; labels are not used. By default the training split."""
    trainable: str = "norms"
    """What --tune trains: mergers, norms, biases, lora or all."""
    time: bool = True
    """Measure latency."""
    forms: tuple[str, ...] = ()
    """Forms to time: eager, compiled, cudagraph, compiled-cudagraph, onnxruntime. By default eager,
    and cudagraph on a GPU or onnxruntime on a CPU. Compiling takes minutes."""
    form: str | None = None
    """The form to deploy; by default the fastest at the first of --time-batches."""
    export: bool = False
    """Also write model.onnx, and check its predictions on all evaluated images."""
    time_batches: tuple[int, ...] = (1, 8)
    """Batch sizes to time."""
    time_rounds: int = 15
    """Rounds of timing; in each, all networks and forms are timed in turn."""
    bottleneck_images: int = 1000
    """Measure the information bottleneck on at most this many images; 0 skips it."""
    pictures: str = "data"
    """Pictures in the report: data, generated, or an image file or folder."""
    split: str = "val"
    """Split of the data to evaluate on, where it has several."""
    images: int | None = None
    """Evaluate on this many images, spread over the classes, instead of all."""
    batch_size: int = 64
    """Images per batch."""
    workers: int = 2
    """Loader processes."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of calibration and fine-tuning."""

    def __post_init__(self) -> None:
        goals = {
            "--ratios or --max-loss": bool(self.ratios) or self.max_loss is not None,
            "--speedup": self.speedup is not None,
            "--budget-ms": self.budget_ms is not None,
        }
        given = [name for name, is_given in goals.items() if is_given]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: give one of them")
        self._check_numbers()
        if given and not self.time:
            raise ValueError(f"{given[0]}: networks have to be timed; leave --no-time out")
        if given and self.finetune_epochs:
            raise ValueError(
                f"{given[0]}: it chooses among networks that are not fine-tuned; leave "
                "--finetune-epochs out, and fine-tune the result"
            )
        if self.tune is not None:
            Length.read(self.tune)
            if self.finetune_epochs:
                raise ValueError("--tune and --finetune-epochs: give one of them")
            distilling(self.trainable)
        elif self.tune_data is not None:
            raise ValueError(f"tune_data is {self.tune_data}: say how long to tune with --tune")

    def _check_numbers(self) -> None:
        for name, least in (("speedup", 1.0), ("budget_ms", 0.0)):
            value = getattr(self, name)
            if value is not None and not least < value < inf:
                raise ValueError(f"{name} is {value:g}: it must be above {least:g}")
        if not 0 <= self.allowed_loss <= 100:
            raise ValueError(f"max_loss is {self.allowed_loss:g}: it is from 0 to 100 points")
        for name in ("calibration_trials", "time_rounds", "images", "batch_size"):
            require_least(name, getattr(self, name))
        for name in ("calibration_images", "finetune_epochs", "bottleneck_images", "workers"):
            require_least(name, getattr(self, name), 0)
        smallest = min(self.time_batches, default=0)
        require(smallest >= 1, "time_batches", self.time_batches, "sizes of at least 1")
        for ratio in self.ratios:
            if not 0 < ratio < 1:
                raise ValueError(f"ratios: got {ratio:g}; each is above 0 and below 1")

    @property
    def allowed_loss(self) -> float:
        """Points that may be lost where a ratio is chosen."""
        return _ALLOWED_LOSS if self.max_loss is None else self.max_loss

    @property
    def curve(self) -> tuple[float, ...]:
        """The ratios that were given, the largest first."""
        return tuple(sorted(set(self.ratios), reverse=True))

    @property
    def first_ratio(self) -> float:
        """The ratio of the first network."""
        return max(self.ratios, default=self.ratio)

    @property
    def num_points(self) -> int:
        """How many ratios are tried; 0 if one ratio was given."""
        return len(self.curve) or (NUM_POINTS if self.max_loss is not None else 0)

    @property
    def has_goal(self) -> bool:
        """Whether a speed or a time was asked for."""
        return self.speedup is not None or self.budget_ms is not None
