"""Do detectors on token-merging backbones learn, and what does merging cost them?

    python -m reproduction.benchmarks.detection_overfit --parts coco_ssdlite coco_mask_rcnn \
        --coco coco-128.zip --output results/detection
    python -m reproduction.benchmarks.detection_overfit --parts shapes_ssdlite shapes_mask_rcnn \
        --output results/detection

`coco_*` trains LTM-MobileViT-S SSDLite and LTM-EfficientViT-B1 Mask R-CNN from scratch on a small
COCO archive and scores them on the same images: a check of the pipeline, not a COCO score.
`shapes_*` trains the same detector with and without merging on generated shapes, for as many
steps, and scores both on other shapes. Every finished run is written down at once, as
`<part>.json`; `results.md` is the table of all that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ltm.api import merging_network, report
from ltm.data.shapes import ShapesDetection
from ltm.detection.inference import draw_detections
from ltm.detection.mask_rcnn import MaskRCNNConfig
from ltm.detection.pyramid import DetectorConfig
from ltm.detection.score import detector_cost, write_results
from ltm.detection.ssdlite import SSDLiteConfig
from ltm.methods import LTM, Learned, Matched
from ltm.methods.ltm.learned import LearnedMerger
from reproduction.benchmarks.detection_data import Pictures, paint_shapes, read_coco
from reproduction.benchmarks.detection_fit import Fit, Recipe, find, fit, score, steps_within
from reproduction.benchmarks.recording import machine, parser, table

HEAD = (
    "detector", "seed", "GMACs", "share", "box AP", "AP50", "AP75", "mask AP", "AP50", "steps",
)  # fmt: skip
PARTS = ("coco_ssdlite", "coco_mask_rcnn", "shapes_ssdlite", "shapes_mask_rcnn")


class Study:
    """The runs that were asked for, one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.output = Path(options.output)
        self.output.mkdir(parents=True, exist_ok=True)
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(options.device or found)
        self.start = time.perf_counter()
        self.log = (self.output / "log.txt").open("a", encoding="utf-8")
        self.rows: list[dict[str, Any]] = []
        self.part, self.failed = "", False

    def say(self, text: str) -> None:
        """One line, at once, to the console and the log."""
        line = f"[{time.perf_counter() - self.start:7.1f} s] {text}"
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def run(self, part: str) -> None:
        """One part; a failure is logged and the next part goes on."""
        self.part, self.rows = part, []
        self.say(f"{part} on {self.device}")
        try:
            # Only SSDLite has inputs of one size everywhere.
            torch.backends.cudnn.benchmark = part.endswith("ssdlite")
            getattr(self, part)()
        except Exception:  # noqa: BLE001 - the next part may still work
            self.failed = True
            self.say(f"{part} failed:\n{traceback.format_exc()}")
        self.write()

    def write(self) -> None:
        """Everything that is known of the part, and the table of all parts."""
        known = {"part": self.part, "machine": machine(self.device), "runs": self.rows}
        (self.output / f"{self.part}.json").write_text(json.dumps(known, indent=1))
        (self.output / "results.md").write_text(page_of(self.output))

    def coco_ssdlite(self) -> None:
        side = self.options.side or 320
        pictures = read_coco(self._coco(), self.device, masks=False, size=side)
        config = self._ssdlite(pictures, side, LTM(ratio=self.options.ratio))
        recipe = Recipe(self.options.lr or 1.5e-3, self.options.batch or 32, **self._long(180))
        self._overfit(config, pictures, recipe, masks=False)

    def coco_mask_rcnn(self) -> None:
        side = self.options.side or 480
        pictures = read_coco(self._coco(), self.device, masks=True, size=None)
        config = self._mask_rcnn(pictures, side, LTM(ratio=self.options.ratio), 4 * side // 3)
        recipe = Recipe(self.options.lr or 8e-4, self.options.batch or 8, **self._long(270))
        self._overfit(config, pictures, recipe, masks=True)

    def shapes_ssdlite(self) -> None:
        side = self.options.side or 320
        train, val = self._shapes()
        merging = LTM(ratio=self.options.ratio, support=Learned())
        configs: dict[str, DetectorConfig] = {
            "original": self._ssdlite(train, side, None),
            "ltm": self._ssdlite(train, side, merging),
            "ltm_as_is": self._ssdlite(train, side, merging, restore=False),
            "ltm_matching": self._ssdlite(train, side, replace(merging, support=Matched())),
        }
        recipe = Recipe(self.options.lr or 2e-3, self.options.batch or 64, flips=True)
        self._compare(configs, train, val, recipe, masks=False, seconds=80)

    def shapes_mask_rcnn(self) -> None:
        side = self.options.side or 256
        train, val = self._shapes()
        merging = LTM(ratio=self.options.ratio, support=Learned())
        matching = replace(merging, support=Matched())
        configs: dict[str, DetectorConfig] = {
            "original": self._mask_rcnn(train, side, None, side),
            "ltm": self._mask_rcnn(train, side, merging, side),
            "ltm_matching": self._mask_rcnn(train, side, matching, side),
        }
        recipe = Recipe(self.options.lr or 1e-3, self.options.batch or 16, flips=True)
        self._compare(configs, train, val, recipe, masks=True, seconds=80)

    def _overfit(
        self, config: DetectorConfig, pictures: Pictures, recipe: Recipe, *, masks: bool
    ) -> None:
        model = self._build(config, 0)
        resized = isinstance(config, SSDLiteConfig)

        def look(masks: bool = False) -> list[dict[str, Any]]:
            results = find(model, pictures, batch_size=32 if resized else 1, resized=resized)
            looks.append(score(pictures, results, masks=masks))
            self.say(f"  {text_of(looks[-1])}")
            return results

        looks: list[dict[str, Any]] = []
        done = fit(model, pictures, recipe, self.say, look)
        results = look(masks)
        row = self._row("ltm", model, done, looks[-1])
        self.rows.append({"backbone": config.backbone, "seed": 0, **row, "halves": looks})
        write_results(self.output / f"{self.part}_predictions.json", results)
        reached = looks[-1]["box"]["ap50"]
        verdict = "above" if reached > 0.5 else "NOT above"
        self.say(f"{self.part}: box AP50 {reached:.3f}, {verdict} 0.5")

    def _compare(
        self,
        configs: dict[str, DetectorConfig],
        train: Pictures,
        val: Pictures,
        recipe: Recipe,
        *,
        masks: bool,
        seconds: float,
    ) -> None:
        chosen = {n: c for n, c in configs.items() if n in (self.options.variants or configs)}
        steps = self.options.steps
        if steps is None:
            makers: list[Callable[[], nn.Module]] = [
                lambda config=config: self._build(config, 0) for config in chosen.values()
            ]
            steps = steps_within(makers, train, recipe, self.options.seconds or seconds)
        self.say(f"{steps} steps of {recipe.batch_size} for each of {', '.join(chosen)}")
        for seed in self.options.seeds:
            for name, config in chosen.items():
                self.say(f"{name}, seed {seed}")
                model = self._build(config, seed)
                once = Recipe(**{**vars(recipe), "steps": steps, "seed": seed})
                done = fit(model, train, once, self.say)
                results = find(model, val, batch_size=1 if masks else 32)
                found = score(val, results, masks=masks)
                self.say(f"{name}, seed {seed}: {text_of(found)}")
                row = self._row(name, model, done, found)
                self.rows.append({"backbone": config.backbone, "seed": seed, **row})
                if seed == self.options.seeds[0] and name in ("original", "ltm"):
                    self._picture(name, model, val)
                self.write()

    @staticmethod
    def _row(name: str, model: nn.Module, done: Fit, found: dict[str, Any]) -> dict[str, Any]:
        cost = detector_cost(model)
        network = merging_network(model)
        return {
            "variant": name,
            **found,
            "gmacs": cost.gmacs,
            "parameters": cost.num_parameters,
            "cost": str(cost),
            "merging": None if network is None else str(report(network)),
            "steps": done.steps,
            "seconds": done.seconds,
            "losses": done.losses,
        }

    def _picture(self, name: str, model: nn.Module, val: Pictures) -> None:
        """A few generated images with what was found on them."""
        from torchvision.transforms.v2.functional import to_pil_image  # noqa: PLC0415
        from torchvision.utils import make_grid  # noqa: PLC0415

        images = val.images[:6]
        with torch.no_grad():
            found = [model.eval()([image])[0] for image in images]
        drawn = [
            draw_detections(image, prediction, val.class_names, threshold=0.4)
            for image, prediction in zip(images, found, strict=True)
        ]
        to_pil_image(make_grid(drawn, nrow=3)).save(self.output / f"{self.part}_{name}.png")

    def _build(self, config: DetectorConfig, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = config.build().to(self.device)
        if self.device.type == "cuda":  # batch normalisation is twice as fast
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        for module in model.modules():
            if isinstance(module, LearnedMerger):
                module.noise = 0.0  # runs are too short to anneal it
        return model

    def _ssdlite(
        self, pictures: Pictures, side: int, merging: LTM | None, *, restore: bool = True
    ) -> SSDLiteConfig:
        return SSDLiteConfig(
            backbone=self.options.ssdlite_backbone,
            num_classes=pictures.num_classes,
            image_size=(side, side),
            merging=merging,
            restore=restore,
        )

    def _mask_rcnn(
        self, pictures: Pictures, side: int, merging: LTM | None, longest: int
    ) -> MaskRCNNConfig:
        return MaskRCNNConfig(
            backbone=self.options.mask_rcnn_backbone,
            num_classes=pictures.num_classes,
            image_size=(side, longest),
            merging=merging,
            width=self.options.width,
            regions_per_image=128,
        )

    def _coco(self) -> Path:
        if not Path(self.options.coco or "").is_file():
            raise FileNotFoundError(f"--coco is {self.options.coco}: there is no such archive")
        return Path(self.options.coco)

    def _shapes(self) -> tuple[Pictures, Pictures]:
        options = self.options
        workers = 1 if self.device.type == "cpu" else os.cpu_count() or 1
        painted: list[Pictures] = []
        for split, count in (("train", options.images), ("val", options.val_images)):
            dataset = ShapesDetection(split, count, options.painted, options.classes)
            painted.append(paint_shapes(dataset, self.device, workers))
        self.say(f"painted {options.images} + {options.val_images} images")
        return painted[0], painted[1]

    def _long(self, seconds: float) -> dict[str, Any]:
        if self.options.steps is not None:
            return {"steps": self.options.steps}
        return {"seconds": self.options.seconds or seconds}


def page_of(folder: Path) -> str:
    """All parts that are there, as Markdown."""
    lines = ["# Detection with and without token merging", ""]
    for path in sorted(folder.glob("*.json")):
        known = json.loads(path.read_text())
        if not isinstance(known, dict) or "runs" not in known:
            continue
        lines += [f"## {known['part']}", "", ", ".join(known["machine"].values()), ""]
        rows: list[list[str]] = []
        whole = next((r["gmacs"] for r in known["runs"] if r["variant"] == "original"), None)
        for row in known["runs"]:
            share = "" if whole is None else f"{row['gmacs'] / whole:.3f}"
            box, mask = row["box"], row.get("mask")
            cells = [f"{row['variant']} {row['backbone']}", str(row["seed"]), f"{row['gmacs']:.3f}"]
            cells += [share, *(f"{100 * box[key]:.1f}" for key in ("ap", "ap50", "ap75"))]
            cells += ["", ""] if mask is None else [f"{100 * mask[k]:.1f}" for k in ("ap", "ap50")]
            rows.append([*cells, str(row["steps"])])
        lines += [table(HEAD, rows), ""]
    return "\n".join(lines)


def text_of(found: dict[str, Any]) -> str:
    """Scores in one line."""
    parts = [
        f"{kind} AP {100 * found[kind]['ap']:.1f} AP50 {100 * found[kind]['ap50']:.1f}"
        for kind in ("box", "mask")
        if kind in found
    ]
    return ", ".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that the command line names."""
    given = parser(__doc__)
    given.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    given.add_argument("--output", required=True)
    given.add_argument("--coco", help="a .zip of images and instances.json")
    given.add_argument("--ratio", type=float, default=0.7, help="share of the backbone's MACs")
    given.add_argument("--variants", nargs="+", help="shapes: which of its rows")
    given.add_argument("--seeds", nargs="+", type=int, default=[0], help="shapes: one run each")
    given.add_argument("--seconds", type=float, help="training time of a run (180, 270, 80, 80)")
    given.add_argument("--steps", type=int, help="training steps of a run, instead of seconds")
    for name, kind in (("--lr", float), ("--batch", int), ("--device", str)):
        given.add_argument(name, type=kind)
    given.add_argument("--side", type=int, help="input side (320; Mask R-CNN 480, shapes 256)")
    given.add_argument("--painted", type=int, default=160, help="side of generated images")
    given.add_argument("--images", type=int, default=4000)
    given.add_argument("--val-images", type=int, default=500)
    given.add_argument("--classes", type=int, default=10)
    given.add_argument("--width", type=int, default=256, help="of Mask R-CNN's heads")
    given.add_argument("--ssdlite-backbone", default="mobilevit_s")
    given.add_argument("--mask-rcnn-backbone", default="efficientvit_b1")
    options = given.parse_args(arguments)
    study = Study(options)
    if study.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    for part in options.parts:
        study.run(part)
    study.say("done")
    sys.exit(int(study.failed))


if __name__ == "__main__":
    main()
