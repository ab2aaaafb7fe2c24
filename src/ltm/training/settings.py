"""Settings of a training run: frozen values, the one source of YAML files and of the command line.

A field's metadata may give its option another name (`option`; None hides it). Options of a group
are named without it, unless the group is `prefixed`. `ltm.cli.commands` reads both.

Importing this module imports neither torch nor timm.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import yaml

from ltm.core.validation import require, require_least
from ltm.data.config import AugmentConfig, DataConfig, without_removed
from ltm.models import changed, did_you_mean, plain, read_words


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network to train."""

    name: str = field(default="vit_tiny_patch16_224", metadata={"option": "model"})
    """Name of a timm model."""
    pretrained: bool = False
    """Start from timm's pretrained weights, which are downloaded."""
    weights: str | None = None
    """Start from a file with timm's keys, or from a folder that ltm wrote."""
    num_classes: int | None = None
    """Number of classes; by default the data's, which it must match. A head of another
    size starts with random weights. Where folders are named by class index (0000, 0001), leave this
    out to keep the head of the weights."""
    model_args: tuple[str, ...] = ()
    """Arguments of the timm model, name=value, such as img_size=64 depth=4."""
    drop_path: float = 0.0
    """Rate of stochastic depth."""


@dataclass(frozen=True, kw_only=True)
class MergingSettings:
    """How tokens are merged. The method option counts overrides --per-block, and that --ratio."""

    method: str = "ltm"
    """Name of a method (ltm, tome, ...), or none to train the network as it is."""
    ratio: float | None = None
    """Share of the original MACs to keep; 0.7 unless --per-block is given."""
    per_block: float | None = None
    """Share of its tokens that each block keeps; the shares multiply from block to block."""
    method_options: tuple[str, ...] = ()
    """More settings of the method, name=value, such as support=learned labels=true."""
    warm_epochs: int = 0
    """Epochs at the start without merging."""
    noise: float = 1.0
    """Initial scale of the noise on learned supports; it falls to 0 over the merging epochs."""


@dataclass(frozen=True, kw_only=True)
class MergeSettings(MergingSettings):
    """How tokens are merged, and which images class statistics are collected on."""

    statistics: Literal["auto", "epoch", "pass"] = "auto"
    """Which images class statistics are collected on: the training batches (epoch), or images
    without augmentation, in a pass after the epoch (pass). auto is pass with mixup or cutmix, and
    epoch without."""
    statistics_images: int = 20000
    """Images in such a pass. Before the first merging epoch there is always one."""


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Which parameters train."""

    trainable: Literal["all", "mergers", "norms", "biases", "lora"] = "all"
    """What trains: all parameters (all), the mask modules alone (mergers), mask modules and
    normalisation layers (norms), those and all biases (biases), or mask modules and LoRA adapters
    (lora). The adapters have rank 8 unless --lora-rank is given."""
    unfreeze: tuple[str, ...] = ()
    """Patterns of further parameters to train, such as head.* or blocks.11.*"""
    lora_rank: int = 0
    """Rank of LoRA adapters (peft); 0 for none."""
    lora_alpha: float = 16.0
    """Scale of LoRA adapters."""
    lora_targets: tuple[str, ...] = ("qkv", "proj")
    """Names of the projections that get LoRA adapters."""

    @property
    def rank(self) -> int:
        """The rank of the adapters; 0 where there are none."""
        return self.lora_rank or (8 if self.trainable == "lora" else 0)


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """Optimiser and learning rate."""

    epochs: int = 300
    """Epochs in all."""
    optimizer: str = "adamw"
    """Name of an optimiser of timm."""
    lr: float = 1e-3
    """Peak learning rate, at a total batch size of --reference-batch."""
    reference_batch: int = 0
    """Total batch size for which lr is given; lr scales in proportion. 0 turns scaling off."""
    merger_lr: float | None = None
    """Learning rate of mask modules; by default lr."""
    weight_decay: float = 0.05
    """Weight decay; biases, normalisation layers and mask modules have none."""
    momentum: float = 0.9
    """Momentum, for optimisers that have one."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate after warm-up: it falls along a cosine, or stays constant."""
    lr_warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises to its peak; may be a fraction."""
    min_lr: float = 1e-5
    """Learning rate at the end of the cosine; at most the peak."""
    clip: float = 0.0
    """Largest norm of the gradient; 0 for no clipping."""
    accumulate: int = 1
    """Batches per update."""
    ema: float = 0.0
    """Decay of the moving average of the weights, which is evaluated and saved instead; 0 for
    none."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What is added to the cross-entropy; nothing by default."""

    bound_weight: float = 0.0
    """Weight of the information-bottleneck bound IBB, averaged over the sites."""
    teacher: Literal["none", "self"] = "none"
    """self: the teacher is the network before training, without merging; labels are not used. The
    loss is the KL divergence from its outputs, at --distill-temperature."""
    feature_weight: float = 0.0
    """With teacher=self: weight of the squared distance between the two networks' normalised class
    tokens after each block. It has no effect on networks without a class token."""
    distill_weight: float = 0.0
    """Share of the loss that is self-distillation: the KL divergence from the outputs of the same
    network without merging."""
    distill_temperature: float = 1.0
    """Softmax temperature of the KL divergences."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where and how it runs."""

    seed: int = 0
    """Seed of initial weights, order, augmentation and noise."""
    device: str = "auto"
    """Accelerator: auto, cpu, cuda, cuda:N for one of several, or mps."""
    devices: int = 1
    """Processes on this machine. torchrun's own number overrides this."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """With several processes, each has a copy of the network (ddp) or a shard of it (fsdp)."""
    precision: Literal["32", "bf16", "16"] = "32"
    """Arithmetic; bf16 and 16 are mixed precision."""
    sync_batchnorm: bool = True
    """Batch normalisation sees the batches of all processes (CUDA only)."""
    grad_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    channels_last: bool = False
    """Use the channels-last memory layout, which is faster for convolutions on GPUs."""
    keep_every: int = 0
    """Also keep every n-th checkpoint, besides the best and the last two; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """All settings of a run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    merge: MergeSettings = field(default_factory=MergeSettings)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig, metadata={"prefixed": True})
    optim: OptimSettings = field(default_factory=OptimSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    tune: TuneSettings = field(default_factory=TuneSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is opened."""
        check_training(self.merge, self.optim, self.run)
        require_least("statistics_images", self.merge.statistics_images)
        require_least("lora_rank", self.tune.lora_rank, 0)
        require_least("bound_weight", self.objective.bound_weight, 0)
        require_least("feature_weight", self.objective.feature_weight, 0)
        temperature = self.objective.distill_temperature
        require(temperature > 0, "distill_temperature", temperature, "positive")
        _require_share("drop_path", self.model.drop_path)
        _require_share("distill_weight", self.objective.distill_weight)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.objective.teacher == "self" and self.objective.distill_weight:
            raise ValueError("distill_weight: with teacher=self there is no other loss to share")
        if self.objective.teacher == "self" and self.run.strategy == "fsdp":
            raise ValueError("teacher=self needs a whole copy of the network; use strategy=ddp")
        if self.run.strategy == "fsdp" and self.optim.ema:
            raise ValueError("ema needs whole copies of the model; use strategy=ddp or ema=0")
        if self.run.strategy == "fsdp" and (self.tune.trainable != "all" or self.tune.rank):
            raise ValueError("strategy=fsdp trains everything; use ddp for fine-tuning")
        if self.augment.mixes and self.data.batch_size % 2:
            raise ValueError(
                f"batch_size is {self.data.batch_size}, but mixup and cutmix need an even number"
            )
        read_words(self.model.model_args, owner="model_args")

    @property
    def statistics_from_epoch(self) -> bool:
        """Whether class statistics are collected on the training batches of an epoch."""
        if self.merge.statistics == "auto":
            return not self.augment.mixes
        return self.merge.statistics == "epoch"


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long to tune: a time, or epochs."""

    seconds: float | None = None
    epochs: int | None = None

    @classmethod
    def read(cls, text: str) -> "Length":
        """Read 60s, 5m, 1.5h, or 3 epochs; spaces do not matter."""
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *(s|m|h|epochs?)", text.strip())
        if found is None or float(found[1]) <= 0 or (found[2][0] == "e" and "." in found[1]):
            raise ValueError(f"tune: got {text!r}; give a time or epochs: 60s, 5m, 1h or 3 epochs")
        if found[2][0] == "e":
            return cls(epochs=int(found[1]))
        return cls(seconds=float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]])

    def __str__(self) -> str:
        if self.epochs is not None:
            return f"{self.epochs} epoch{'s' if self.epochs > 1 else ''}"
        return f"{self.seconds:g} s"


def check_training(merge: MergingSettings, optim: OptimSettings, run: RunSettings) -> None:
    """Refuse settings with which nothing can be trained."""
    require_least("epochs", optim.epochs)
    require_least("accumulate", optim.accumulate)
    require_least("devices", run.devices)
    not_negative: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (merge, ("warm_epochs", "noise")),
        (optim, ("clip", "reference_batch", "merger_lr", "weight_decay", "momentum")),
        (optim, ("lr_warmup_epochs", "min_lr")),
        (run, ("keep_every",)),
    )
    for group, names in not_negative:
        for name in names:
            require_least(name, getattr(group, name), 0)
    require(optim.lr > 0, "lr", optim.lr, "positive")
    _require_share("ema", optim.ema)
    require_method(merge.method)
    read_words(merge.method_options, owner="method_options")


def require_method(name: str, *, fitted: bool = True) -> None:
    """Refuse an unknown method, and, unless `fitted`, a method that is fitted to images."""
    if name in ("none", MergingSettings.method):
        return
    from ltm.methods import methods  # noqa: PLC0415 - settings are read without torch

    every = [method for method in methods().values() if fitted or not method().needs_images()]
    aliases = [alias for method in every for alias in method.aliases]
    known = [*(method.name for method in every), *aliases, "none"]
    if name not in known:
        raise ValueError(f"merge.method is {name!r}; choose from {', '.join(known)}")


def _require_share(name: str, value: float) -> None:
    """Refuse a number outside of [0, 1)."""
    require(0.0 <= value < 1.0, name, value, "at least 0 and below 1")


T = TypeVar("T")


def to_yaml(settings: Any) -> str:
    """Write settings as YAML, all of them."""
    return yaml.safe_dump(plain(settings), sort_keys=False, width=100)


def with_options(settings: T, options: Mapping[str, Any]) -> T:
    """Change single settings, by the name of their field, and whole groups, by that of the group.

    Fields of a prefixed group are changed through their group.
    """
    groups = {field.name: field for field in fields(cast("Any", settings))}
    homes = {
        field.name: name
        for name, group in groups.items()
        if is_dataclass(value := getattr(settings, name)) and not group.metadata.get("prefixed")
        for field in fields(value)
    }
    changes: dict[str, Any] = {}
    single: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name in groups:
            changes[name] = value
        elif name in homes:
            single.setdefault(homes[name], {})[name] = value
        else:
            raise ValueError(f"{name} is no setting; {did_you_mean(name, [*groups, *homes])}")
    for name, values in single.items():
        group = changes.get(name, {})
        if isinstance(group, Mapping):
            changes[name] = {**group, **values}
        elif is_dataclass(group):
            changes[name] = changed(group, values, f"{name}.")
    return changed(settings, changes)


def read_settings(path: str | Path, base: T) -> T:
    """Read a YAML file of settings; `base` gives the settings that the file lacks."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"settings are to come from {path}: there is no such file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings; write groups such as optim: {{epochs: 5}}")
    values = _of_today(values)
    try:
        return changed(base, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


_MOVED = {
    "optim": {"merge_threshold_lr": 5e-3, "prune_threshold_lr": 5e-6},
    "objective": {"budget_weight": 10.0},
}
"""Settings of 0.1.0 that became options of the method they were for, and their defaults."""


def _of_today(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as 0.1.0 wrote them into a file, translated into those of today."""
    groups = {name: dict(v) if isinstance(v, dict) else v for name, v in values.items()}
    if isinstance(groups.get("data"), dict):
        groups["data"] = without_removed(groups["data"])
    options: list[str] = []
    for group, usual in _MOVED.items():
        found = groups.get(group)
        if isinstance(found, dict):
            given = {name: found.pop(name, value) for name, value in usual.items()}
            options += [f"{name}={given[name]}" for name in usual if given[name] != usual[name]]
    merge = groups.get("merge")
    if options and isinstance(merge, dict):
        from ltm.methods import methods  # noqa: PLC0415 - settings are read without torch

        method = methods().get(str(merge.get("method")))
        known = () if method is None else method.settings_types()
        own = [option for option in options if option.partition("=")[0] in known]
        merge["method_options"] = [*merge.get("method_options", ()), *own]
    return groups
