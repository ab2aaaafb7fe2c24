"""How fast `ltm.embed` is beside the bare network, and beside a plain DataLoader.

    python -m reproduction.benchmarks.embed_throughput --output results/scale/embed_throughput

A case is a network, untouched or merging. Its captured forward is timed on a batch that lies on
the GPU; then the whole of `ltm.embed` runs over tar shards of 8-bit arrays (pixels are random), and
its rate is counted from the first answers on. At the end images are JPEGs of a folder, and the
network is small: `embed` and a plain DataLoader with as many workers take turns.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import ltm
from ltm.api import is_merging
from ltm.data.reading import Chunk, Preparation, ahead, read_chunks
from ltm.data.sources import find_parts
from ltm.data.transforms import ImageSpec, evaluation_transform
from ltm.deployment.embedding import one_ahead, stacked
from ltm.deployment.tables import Tables
from ltm.evaluation.modes import use_fast_paths_
from reproduction.benchmarks.recording import machine, parser, table, write_rows


class Case(NamedTuple):
    """A network, its images, a batch, how many of them are embedded, and the merging to try."""

    model: str
    size: int
    batch: int
    batches: int
    ratios: tuple[float, ...] = (1.0, 0.5, 0.7)


CASES = (
    Case("vit_large_patch16_224", 224, 256, 160),
    Case("vit_base_patch16_224", 224, 256, 96),
    Case("vit_large_patch14_dinov2", 518, 32, 64),
)
TINY = (Case("test_vit", 160, 8, 8, (1.0, 0.7)),)
WARM_BATCHES = 32


def _write_shards(folder: Path, size: int, images: int, shards: int) -> list[str]:
    """Tar shards of arrays; a few megabytes of noise serve all of them."""
    noise = np.random.default_rng(0).integers(0, 256, (8, size, size, 3), np.uint8)
    paths = []
    for shard in range(shards):
        path = folder / f"{size}-{shard:03d}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(images // shards):
                file = io.BytesIO()
                np.save(file, np.roll(noise[number % 8], number, axis=0))
                member = tarfile.TarInfo(f"{shard:03d}{number:05d}.npy")
                member.size = file.tell()
                file.seek(0)
                tar.addfile(member, file)
        paths.append(str(path))
    return paths


def _network(case: Case, ratio: float, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    with device:
        network = timm.create_model(case.model, img_size=case.size).eval()
    if ratio < 1:
        ltm.merge_tokens_(network, ltm.LTM(ratio=ratio, weights="uniform"), case.size)
    return network


def _bare(network: torch.nn.Module, case: Case, device: torch.device) -> float:
    """Images a second of the captured forward, on a batch that is there already."""
    if device.type != "cuda":
        return float("nan")
    if is_merging(network):
        ltm.freeze_(network)
    use_fast_paths_(network)
    images = torch.randn(case.batch, 3, case.size, case.size, device=device).half()
    run = ltm.capture(network.half(), images)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats := 8):
            run(run.images)
        torch.cuda.synchronize()
        rates.append(repeats * case.batch / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def _chunks(inputs: list[str], batch: int, batches: int) -> Iterator[Chunk]:
    """As `ltm.embed` cuts them; inputs are repeated until there are enough."""
    parts = itertools.cycle(find_parts(inputs))
    found = 0
    for number, images in ahead((n, tuple(part.images())) for n, part in enumerate(parts)):
        for first in range(0, len(images), batch):
            if found == batches:
                return
            found += 1
            yield Chunk(images[first : first + batch], number, first, len(images))


def _embed(
    predictor: ltm.BatchPredictor, inputs: list[str], options: argparse.Namespace, *, batches: int
) -> float:
    """Images a second of reading, the network and writing, once the loader is under way.

    It writes Parquet files where pyarrow is installed.
    """
    spec = predictor.loaded.information.spec
    began, images = 0.0, 0
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Tables(Path(folder), {})) if options.writes else nullcontext() as tables,
    ):
        read = read_chunks(
            _chunks(inputs, predictor.batch_size, batches),
            Preparation(spec),
            workers=options.workers,
            collate=partial(stacked, size=spec.size),
            pin_memory=predictor.loaded.device.type == "cuda",
        )
        for number, answers in enumerate(one_ahead(predictor, read)):
            if tables is not None:
                tables.add(answers)
            if number == min(WARM_BATCHES, batches // 2):
                began = time.perf_counter()
            elif began:
                images += len(answers["id"])
    return images / (time.perf_counter() - began)


def _measure(case: Case, inputs: list[str], options: argparse.Namespace) -> Iterator[dict]:
    device = torch.device(options.device)
    original: dict[str, float] = {}
    for ratio in options.ratios or case.ratios:
        network = _network(case, ratio, device)
        predictor = ltm.BatchPredictor(network, device=options.device, batch_size=case.batch)
        rate = _embed(predictor, inputs, options, batches=case.batches)
        predictor.unload()
        bare = _bare(network, case, device)
        original = original or {"bare": bare, "embed": rate}
        yield {
            "model": case.model,
            "size": case.size,
            "batch": case.batch,
            "ratio": ratio,
            "network_images_per_second": bare,
            "embed_images_per_second": rate,
            "embed_share": rate / bare,
            "faster_than_original": rate / original["embed"],
            "date": time.strftime("%Y-%m-%d"),
        }


class _Plain(Dataset):
    def __init__(self, paths: list[Path], spec: ImageSpec) -> None:
        self.paths, self.transform = paths, evaluation_transform(spec)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


def _decoding(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """JPEGs of a folder through `embed` and through a plain DataLoader, by turns."""
    images, batch = options.jpegs, min(128, options.jpegs // 8)
    pictures = []
    for coarse in np.random.default_rng(0).integers(0, 256, (64, 16, 20, 3), np.uint8):
        file = io.BytesIO()
        smooth = Image.fromarray(coarse).resize((500, 400), Image.Resampling.BICUBIC)
        smooth.save(file, "JPEG", quality=90)
        pictures.append(file.getvalue())
    paths = [folder / f"{number:06d}.jpg" for number in range(images)]
    for number, path in enumerate(paths):
        path.write_bytes(pictures[number % len(pictures)])
    network = timm.create_model(options.small).eval()
    predictor = ltm.BatchPredictor(network, device=options.device, batch_size=batch)
    spec = predictor.loaded.information.spec
    ours, plain = [], []
    for _ in range(3):
        ours.append(_embed(predictor, [str(folder)], options, batches=images // batch))
        began = seen = 0
        loader = DataLoader(_Plain(paths, spec), batch, num_workers=options.workers)
        for number, found in enumerate(loader):
            if number == min(WARM_BATCHES, images // batch // 2):
                began = time.perf_counter()
            elif began:
                seen += len(found)
        plain.append(seen / (time.perf_counter() - began))
    return {
        "network": options.small,
        "images": images,
        "workers": options.workers,
        "embed_images_per_second": statistics.median(ours),
        "loader_images_per_second": statistics.median(plain),
        "share": statistics.median(ours) / statistics.median(plain),
    }


def main() -> None:
    """Measure every case, and write a row for each as it comes."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path, required=True)
    options.add_argument("--device", default="cuda")
    options.add_argument("--workers", type=int, default=12)
    options.add_argument("--jpegs", type=int, default=6000)
    options.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    options.add_argument("--ratios", type=float, nargs="+")
    options.add_argument("--small", default="vit_tiny_patch16_224")
    options.add_argument("--tiny", action="store_true", help="see that it runs, on a processor")
    options.add_argument("--seconds", type=float, default=150, help="begin nothing after that")
    args = options.parse_args()
    args.writes = find_spec("pyarrow") is not None
    began, rows, decoding = time.monotonic(), [], None
    about = {**machine(torch.device(args.device)), "workers": args.workers, "parquet": args.writes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "jpegs").mkdir()
        for case in TINY if args.tiny else [CASES[number] for number in args.cases]:
            inputs = _write_shards(folder, case.size, case.batch * min(case.batches, 24), 4)
            for row in _measure(case, inputs, args):
                rows.append({**row, "seconds": round(time.monotonic() - began, 1)})
                print(rows[-1], flush=True)
                _write(args.output, about, rows, decoding)
                if time.monotonic() - began > args.seconds:
                    return
            if decoding is None and args.jpegs:
                decoding = _decoding(folder / "jpegs", args)
                print(decoding, time.monotonic() - began, flush=True)
                _write(args.output, about, rows, decoding)


def _write(path: Path, about: dict[str, Any], rows: list[Any], decoding: Any) -> None:
    head = ("network", "share of MACs", "network, images/s", "embed, images/s", "embed / network")
    head += ("embed, against the unmerged network", "measured")
    lines = [
        [
            f"{row['model']} at {row['size']} px",
            f"{row['ratio']:.1f}",
            round(row["network_images_per_second"]) if row["network_images_per_second"] > 0 else "",
            round(row["embed_images_per_second"]),
            row["embed_share"],
            "" if (faster := row["faster_than_original"]) is None else f"{faster:.2f}x",
            row["date"],
        ]
        for row in rows
    ]
    page = f"# Throughput of `ltm embed`\n\n{about['device']}, float16, torch {about['torch']}.\n\n"
    page += table(head, lines)
    if decoding is not None:
        page += (
            f"\n\nJPEGs of 500 x 400 pixels, {decoding['workers']} loader processes: `ltm embed` with "
            f"an unmerged {decoding['network']} takes {decoding['embed_images_per_second']:,.0f} "
            f"images a second, a plain DataLoader {decoding['loader_images_per_second']:,.0f}."
        )
    write_rows(path, {**about, "decoding": decoding}, rows, page)


if __name__ == "__main__":
    main()
