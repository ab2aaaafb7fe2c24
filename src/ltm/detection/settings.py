"""Settings of detectors: to train them, in the groups of `ltm.training`, and to use them.

Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ltm.core.validation import require, require_least
from ltm.models import changed, did_you_mean
from ltm.training.settings import (
    MergingSettings,
    OptimSettings,
    RunSettings,
    check_training,
    require_method,
)

Task = Literal["ssdlite", "mask_rcnn"]
COMMANDS: dict[Task, str] = {"ssdlite": "detect", "mask_rcnn": "segment"}
"""The command of every task."""


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """The detector to train."""

    task: Task = field(default="ssdlite", metadata={"option": None})
    """What to find: boxes (SSDLite), or boxes and masks (Mask R-CNN)."""
    backbone: str = "mobilevit_s"
    """Name of a timm network, or folder of a converted one that ltm wrote."""
    pretrained: bool = False
    """Start from timm's published weights (needs a network)."""
    weights: str | None = None
    """Start from a file of weights with timm's keys."""
    image_size: tuple[int, int] = (320, 320)
    """SSDLite: height and width. Mask R-CNN: shorter side, and limit of the longer side."""
    restore: bool = True
    """Resample feature maps that merging has shrunk to their nominal size. SSDLite works without
    this, too."""
    width: int = 256
    """Mask R-CNN: channels of the feature pyramid network and of the heads."""
    regions_per_image: int = 512
    """Mask R-CNN: regions per image on which the heads are trained."""


@dataclass(frozen=True, kw_only=True)
class DetectionData:
    """Which images, and how they reach the detector."""

    source: str = field(default="shapes", metadata={"option": "data"})
    """A folder or .zip of images with COCO annotations, or the word shapes for
    generated images."""
    train_split: str = "train"
    """Split to train on."""
    val_split: str = "val"
    """Split to evaluate on. Data without splits are evaluated on the training images."""
    annotations: str | None = None
    """Annotation file of the training images, if it has no usual name."""
    val_annotations: str | None = None
    """Annotation file of the images to evaluate on, if it has no usual name."""
    batch_size: int = 32
    """Images per batch and process."""
    eval_batch_size: int = 1
    """Images per batch in evaluation. With 1, no image is padded to the size of another."""
    workers: int = 2
    """Loader processes per training process; 0 loads in the process itself."""
    crops: bool = True
    """Augment as SSD does, by zooming out and by crops around objects."""
    photometric: bool = True
    """Random brightness, contrast, saturation and hue."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """All settings of a detector's training."""

    detector: DetectorSettings = field(default_factory=DetectorSettings)
    merge: MergingSettings = field(default_factory=MergingSettings)
    data: DetectionData = field(default_factory=DetectionData)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)
    eval_every: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is opened."""
        check_training(self.merge, self.optim, self.run)
        require_method(self.merge.method, fitted=False)
        for name, value, least in (
            ("eval_every", self.eval_every, 1),
            ("workers", self.data.workers, 0),
            ("eval_batch_size", self.data.eval_batch_size, 1),
            ("batch_size", self.data.batch_size, 2 if self.detector.task == "ssdlite" else 1),
            ("image_size", min(self.detector.image_size), 32),
        ):
            require_least(name, value, least)
        hflip = self.data.hflip
        require(0 <= hflip <= 1, "hflip", hflip, "at least 0 and at most 1")
        if self.run.strategy == "fsdp":
            raise ValueError("strategy is fsdp, but detectors train with auto or ddp")
        if self.detector.task == "mask_rcnn" and not self.detector.restore:
            raise ValueError("restore is off, but Mask R-CNN needs maps at their nominal size")


@dataclass(frozen=True, kw_only=True)
class PredictDetectorSettings:
    """What to draw, and where the detector runs."""

    threshold: float = 0.3
    """Draw objects with at least this score."""
    device: str = "auto"
    """Where the detector runs: auto, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        threshold = self.threshold
        require(0 <= threshold <= 1, "threshold", threshold, "at least 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class EvaluateDetectorSettings(PredictDetectorSettings):
    """Which images to evaluate a detector on, and how."""

    split: str = "val"
    """Split to evaluate on."""
    annotations: str | None = None
    """Annotation file, if it has no usual name."""
    batch_size: int = 1
    """Images per batch."""
    workers: int = 2
    """Loader processes; 0 loads in the process itself."""
    pictures: int = 4
    """How many images to draw, with the objects that were found."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least("batch_size", self.batch_size)
        require_least("workers", self.workers, 0)
        require_least("pictures", self.pictures, 0)


def find_detection_recipe(name: str, task: Task | None = None) -> DetectionSettings:
    """A recipe by name, for a task if one is given; a ValueError suggests other names."""
    known = {key: value for key, value in RECIPES.items() if task in (None, value.detector.task)}
    if name not in known:
        raise ValueError(f"recipe is {name}; {did_you_mean(name, known)}")
    return known[name]


_SSDLITE = DetectionSettings(
    optim=OptimSettings(epochs=200, lr=9e-4, min_lr=1.6e-6, weight_decay=0.01), eval_every=5
)
_MASK_RCNN = DetectionSettings(
    detector=DetectorSettings(task="mask_rcnn", backbone="efficientvit_b1", image_size=(800, 1333)),
    data=DetectionData(batch_size=4, crops=False, photometric=False),
    optim=OptimSettings(epochs=12, lr=1e-3, min_lr=0.0, lr_warmup_epochs=0.1),
)
_SMALL_DATA = {"source": "shapes:size=96,images=256,val_images=64,classes=3", "workers": 0}
_SMALL_OPTIM = {"epochs": 30, "lr": 2e-3, "lr_warmup_epochs": 1.0, "clip": 5.0}

RECIPES: dict[str, DetectionSettings] = {
    "ssdlite": _SSDLITE,
    "ssdlite_mobilevit_xs": changed(_SSDLITE, {"detector": {"backbone": "mobilevit_xs"}}),
    "ssdlite_efficientvit_b1": changed(_SSDLITE, {"detector": {"backbone": "efficientvit_b1"}}),
    "mask_rcnn": _MASK_RCNN,
    "shapes_ssdlite": changed(
        _SSDLITE,
        {
            "detector": {"backbone": "mobilevit_xxs", "image_size": (96, 96)},
            "data": {**_SMALL_DATA, "batch_size": 16, "photometric": False, "crops": False},
            "optim": _SMALL_OPTIM,
            "merge": {"noise": 0.0},
        },
    ),
    "shapes_mask_rcnn": changed(
        _MASK_RCNN,
        {
            "detector": {
                "backbone": "efficientvit_b0",
                "image_size": (96, 96),
                "width": 64,
                "regions_per_image": 32,
            },
            "data": {**_SMALL_DATA, "batch_size": 8},
            "optim": {**_SMALL_OPTIM, "lr": 1e-3, "epochs": 10},
            "merge": {"noise": 0.0},
            "eval_every": 5,
        },
    ),
}
"""The paper's recipes, and small ones for a CPU."""
