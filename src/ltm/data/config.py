"""Settings of data and augmentation: frozen values for the command line and YAML alike."""

from dataclasses import dataclass, field, replace
from typing import Any

from ltm.core.validation import require, require_least

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")


def is_generated(source: str) -> bool:
    """Say whether a source names generated shapes; a folder of that name is written ./shapes."""
    return source.partition(":")[0] == "shapes"


def require_image_settings(
    crop_ratio: float | None,
    interpolation: str | None = None,
    std: tuple[float, ...] | None = None,
) -> None:
    """Refuse impossible images of a network; None is what the model expects."""
    fits = crop_ratio is None or 0.0 < crop_ratio <= 1.0
    require(fits, "crop_ratio", crop_ratio, "above 0 and at most 1")
    known = interpolation is None or interpolation in _INTERPOLATIONS
    require(known, "interpolation", interpolation, f"one of {', '.join(_INTERPOLATIONS)}")
    require(std is None or min(std) > 0.0, "std", std, "above 0")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how they reach the network."""

    source: str = field(default="shapes", metadata={"option": "data"})
    """A folder or .zip of class folders, tar shards, hf:NAME, or the word shapes for
    generated images."""
    train_split: str = "train"
    """Split to train on."""
    val_split: str = "val"
    """Split to evaluate on."""
    holdout_ratio: float = 0.1
    """Share of each class to hold out for validation, for class folders that are not split."""
    image_size: int | None = None
    """Side of the network's input in pixels; by default what the model was made for."""
    crop_ratio: float | None = None
    """Evaluation crop as a share of the resized side; by default the model's (1 for shapes)."""
    interpolation: str | None = None
    """nearest, bilinear, bicubic, box, hamming or lanczos; by default the model's."""
    mean: tuple[float, float, float] | None = None
    """Mean of the normalisation, of values from 0 to 1; by default the model's."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of the normalisation; by default the model's."""
    batch_size: int = 64
    """Images per batch and process."""
    workers: int = 2
    """Loader processes per training process; 0 loads in the process itself."""
    epoch_images: int = 0
    """Training images in an epoch, drawn anew for each; 0 for all."""
    max_unreadable: int = 10
    """Unreadable images to skip before the run stops."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is opened."""
        require_least("batch_size", self.batch_size)
        require_least("image_size", self.image_size)
        for name in ("epoch_images", "workers", "max_unreadable"):
            require_least(name, getattr(self, name), 0)
        ratio = self.holdout_ratio
        require(0.0 <= ratio < 1.0, "holdout_ratio", ratio, "at least 0 and below 1")
        require_image_settings(self.crop_ratio, self.interpolation, self.std)


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How training images are varied; the defaults are DeiT's."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the image's area that a random crop covers."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Aspect ratio of a random crop."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    color_jitter: float = 0.4
    """Strength of colour jitter; unused where auto_augment is set."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's name of an augmentation policy, such as RandAugment's."""
    erase: float = 0.25
    """Probability of random erasing."""
    mixup: float = 0.8
    """Mixup's alpha; 0 switches it off."""
    cutmix: float = 1.0
    """CutMix's alpha; 0 switches it off."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed at all."""
    switch_prob: float = 0.5
    """Probability of CutMix instead of Mixup where both are on."""
    smoothing: float = 0.1
    """Label smoothing."""
    repeats: int = 1
    """How often each drawn image is repeated, augmented differently; DeiT uses 3."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("hflip", "erase", "mix_prob", "switch_prob"):
            value = getattr(self, name)
            require(0.0 <= value <= 1.0, name, value, "from 0 to 1")
        for name in ("mixup", "cutmix", "color_jitter"):
            require_least(name, getattr(self, name), 0)
        require(0.0 <= self.smoothing < 1.0, "smoothing", self.smoothing, "at least 0 and below 1")
        require_least("repeats", self.repeats)

    @property
    def varies(self) -> bool:
        """Say whether single images are varied at all."""
        crops = self.scale != (1.0, 1.0) or self.ratio != (1.0, 1.0)
        changes = self.hflip or self.color_jitter or self.auto_augment or self.erase
        return crops or bool(changes)

    @property
    def mixes(self) -> bool:
        """Say whether batches are mixed."""
        return self.mix_prob > 0.0 and (self.mixup > 0.0 or self.cutmix > 0.0)

    @classmethod
    def light(cls) -> "AugmentConfig":
        """Return mild settings, for fine-tuning and for small data: crops and flips only."""
        return cls(
            scale=(0.6, 1.0),
            color_jitter=0.0,
            auto_augment=None,
            erase=0.0,
            mixup=0.0,
            cutmix=0.0,
            smoothing=0.0,
        )

    @classmethod
    def none(cls) -> "AugmentConfig":
        """Return settings that leave images as evaluation sees them."""
        return replace(cls.light(), scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0)


def without_removed(values: dict[str, Any]) -> dict[str, Any]:
    """Return data settings that 0.1.0 wrote, without those that no longer exist."""
    removed = ("resident", "shuffle_buffer")
    return {name: value for name, value in values.items() if name not in removed}
