"""What `training_tiny_imagenet.py` writes: rows, times and the loader's speed, part by part."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Report:
    """Rows and timings, written after every part."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.rows: list[Row] = []
        self.loader: list[Row] = []
        self.failures: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Run one part; what it raises is noted and goes no further."""
        start = time.perf_counter()
        print(f"--- {name}", flush=True)
        try:
            run()
        except Exception:  # noqa: BLE001 - the parts after it do not depend on this one
            self.failures.append(f"{name}: {traceback.format_exc()}")
            print(self.failures[-1], flush=True)
        print(f"--- {name}: {time.perf_counter() - start:.0f} s", flush=True)
        self.write()

    def write(self) -> None:
        """Write JSON and Markdown."""
        content = {
            **self.about,
            "rows": self.rows,
            "loader": self.loader,
            "failures": self.failures,
        }
        text = json.dumps(content, indent=1)
        (self.folder / "training_tiny_imagenet.json").write_text(text + "\n", encoding="utf-8")
        tables = (self._heading(), self._accuracy(), self._times(), self._loading())
        markdown = "\n\n".join(tables)
        (self.folder / "training_tiny_imagenet.md").write_text(markdown + "\n", encoding="utf-8")

    def _heading(self) -> str:
        return (
            "# ViT-Ti on Tiny-ImageNet: LTM and LTMP fine-tuned\n\n"
            f"{self.about['device']}, torch {self.about['torch']}, timm {self.about['timm']}, "
            f"{self.about['precision']}, batch {self.about['batch_size']}, input "
            f"{self.about['image_size']} px. Only mask modules train after the base."
        )

    def _accuracy(self) -> str:
        lines = [
            "| network | epochs | share of MACs | top-1 (%) | trained parameters |",
            "|" + "---|" * 5,
        ]
        for row in self.rows:
            share = "" if row["mac_share"] is None else f"{row['mac_share']:.3f}"
            top1, trained = f"{100 * row['top1']:.2f}", f"{row['trained']:,}"
            lines.append(f"| {row['name']} | {row['epochs']} | {share} | {top1} | {trained} |")
        return "\n".join(lines)

    def _times(self) -> str:
        """Seconds per epoch: the median of the longer runs, after their first epoch."""
        lines = [
            "| network | s/epoch, training | s/epoch with statistics | of LTMP's | images/s |",
            "|" + "---|" * 5,
        ]
        longest = {row["name"]: row for row in self.rows if row["epochs"] > 1}
        reference = longest.get("LTMP", {}).get("seconds_all")
        for name, row in longest.items():
            ratio = f"{row['seconds_all'] / reference:.3f}" if reference and "LTM" in name else ""
            lines.append(
                f"| {name} | {row['seconds']:.2f} | {row['seconds_all']:.2f} | {ratio} "
                f"| {row['images_per_second']:.0f} |"
            )
        return "\n".join(lines)

    def _loading(self) -> str:
        lines = ["| loop, ViT-S at 224 px | images/s | share of pre-loaded |", "|" + "---|" * 3]
        fastest = max((r["images_per_second"] for r in self.loader if r["preloaded"]), default=0.0)
        for row in self.loader:
            share = f"{row['images_per_second'] / fastest:.3f}" if fastest else ""
            lines.append(f"| {row['name']} | {row['images_per_second']:.0f} | {share} |")
        return "\n".join(lines)
