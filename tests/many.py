"""Many small images in shards, and a network that takes no time; importable by other processes."""

import io
import os
import signal
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import ltm
from ltm.models import create_model

SIZE = 48


def save_network(folder: Path, **arguments: object) -> Path:
    """A saved network that merges."""
    torch.manual_seed(0)
    settings = {"img_size": SIZE, "num_classes": 7, **arguments}
    model = create_model("test_vit", settings).eval()
    ltm.merge_tokens_(model, ltm.ToMe(counts=(5,), sites=(0,)))
    ltm.save(model, folder)
    return folder


def pixels(number: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8)


def encoded(number: int, kind: str = "png") -> bytes:
    file = io.BytesIO()
    if kind == "npy":
        np.save(file, pixels(number))
    else:
        Image.fromarray(pixels(number, 56)).save(file, kind)
    return file.getvalue()


def write_shard(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_shards(folder: Path, shards: int, images: int, broken: tuple[int, ...] = ()) -> str:
    """Shards of arrays and PNGs by turns; returns their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        contents = {}
        for number in range(shard * images, (shard + 1) * images):
            kind = "npy" if number % 2 else "png"
            data = b"no image" if number in broken else encoded(number, kind)
            contents[f"{number:06d}.{kind}"] = data
        write_shard(folder / f"a-{shard:03d}.tar", contents)
    return str(folder / f"a-{{000..{shards - 1:03d}}}.tar")


class Deadly(ltm.BatchPredictor):
    """A predictor whose process is killed at its third batch, unless a file says that one was."""

    marker = ""
    calls = 0

    def submit(self, batch: Mapping[str, Any]) -> Any:
        self.calls += 1
        if self.calls == 3 and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().submit(batch)
