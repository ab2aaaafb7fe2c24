"""Where a merged token stands in a network with rotary positions: the choices, measured.

    python -m reproduction.benchmarks.rotary_positions --data tiny-imagenet.zip
        --output results/rotary/rotary_positions

A small ViT with the rotary positions of DINOv3 is trained from scratch, without merging, once a
seed. Then its tokens merge, with nothing trained any more: by LTM and by ToMe, with every choice of
`ltm.adapters.eva.ANGLES`. Loss, top-1 and the divergence from the network without merging are on
validation images.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import ltm
from ltm.adapters.eva import ANGLES, RotaryMixin
from ltm.evaluation.accuracy import evaluate, summarise
from ltm.evaluation.images import load_batches, open_images
from reproduction.benchmarks.recording import machine, parser, plain, table, write_rows

METHODS: dict[str, Any] = {"LTM": ltm.LTM, "ToMe": ltm.ToMe}


def network(size: int, num_classes: int) -> nn.Module:
    """DINOv3 in small: 256 tokens at 64 px."""
    return timm.create_model(
        "vit_small_patch16_dinov3",
        img_size=size,
        patch_size=size // 16,
        embed_dim=192,
        depth=9,
        num_heads=3,
        num_classes=num_classes,
        global_pool="token",
        init_values=None,
        head_init_scale=1.0,
    )


def read(data: str, split: str, model: nn.Module, workers: int, images: int | None) -> Any:
    """All images of a split, prepared for the model, and their labels; both on its device."""
    found = open_images(data, split, images)
    batches = load_batches(found, data, model, batch_size=500, workers=workers, labelled=False)
    pairs = list(batches)
    device = next(model.parameters()).device
    return tuple(torch.cat([pair[part] for pair in pairs]).to(device) for part in range(2))


def varied(images: Tensor) -> Tensor:
    """Shifted by up to an eighth, and mirrored: one draw an image."""
    batch, _, side, _ = images.shape
    shifts = torch.randint(-(side // 8), side // 8 + 1, (2, batch, 1), device=images.device)
    places = torch.arange(side, device=images.device)[None]
    rows, columns = ((places + shift).clamp(0, side - 1) for shift in shifts)
    mirrored = torch.rand(batch, 1, device=images.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    at = torch.arange(batch, device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[at, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def train_(model: nn.Module, images: Tensor, labels: Tensor, options: Any) -> float:
    """AdamW, one cycle, label smoothing; returns the seconds it took."""
    steps = options.epochs * (len(images) // options.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, max(steps, 2))
    half = torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda)
    model.train()
    began = time.monotonic()
    for step in range(steps):
        chosen = torch.randint(len(images), (options.batch_size,), device=images.device)
        with half:
            logits = model(varied(images[chosen]))
        loss = functional.cross_entropy(logits.float(), labels[chosen], label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        cycle.step()
        if step % max(1, steps // 10) == 0:
            print(f"step {step} of {steps}, loss {float(loss):.3f}", flush=True)
    model.eval()
    return time.monotonic() - began


def measure(model: nn.Module, held_out: Any, ratios: list[float]) -> list[dict[str, Any]]:
    """A row for every method, choice and ratio, on the same images."""
    size = held_out[0].shape[-1]
    before = RotaryMixin.angles
    rows = []
    batches = list(zip(*(part.split(500) for part in held_out), strict=True))
    for ratio in ratios:
        for method, config in METHODS.items():
            for choice in ANGLES:
                RotaryMixin.angles = choice
                merging = copy.deepcopy(model)
                share = ltm.merge_tokens_(merging, config(ratio=ratio), size).share
                found = evaluate({"base": model, "merged": merging}, batches, original="base")
                base, merged = (summarise(found[name]) for name in ("base", "merged"))
                row = {"ratio": ratio, "method": method, "position": choice, "share": share}
                row |= {"loss": merged.loss, "top1": merged.top1, "divergence": merged.divergence}
                rows.append({**row, "base_loss": base.loss, "base_top1": base.top1})
                print(rows[-1], flush=True)
    RotaryMixin.angles = before
    return rows


def main() -> None:
    """Train a network a seed, measure all choices, and write rows with a table of their means."""
    options = parser(__doc__)
    options.add_argument("--data", required=True)
    options.add_argument("--output", type=Path)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--epochs", type=int, default=40)
    options.add_argument("--batch-size", type=int, default=256)
    options.add_argument("--lr", type=float, default=1e-3)
    options.add_argument("--ratios", type=float, nargs="+", default=[0.7, 0.55])
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--images", type=int, help="of each split; all by default")
    args = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_classes = open_images(args.data, "train", args.images).num_classes
    rows: list[dict[str, Any]] = []
    splits: Any = None
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = network(args.size, num_classes).to(device)
        if splits is None:
            splits = [
                read(args.data, part, model, args.workers, args.images) for part in ("train", "val")
            ]
        images, labels = splits[0]
        seconds = train_(model, images, labels, args)
        print(f"seed {seed}: {seconds:.0f} s of training", flush=True)
        rows += [{"seed": seed, **row} for row in measure(model, splits[1], args.ratios)]
        if args.output is not None:
            _write(args, rows)


def _write(args: Any, rows: list[dict[str, Any]]) -> None:
    head = ["share of MACs", "method", "merged position", "loss", "more loss", "top-1", "KL"]
    lines = []
    for key in dict.fromkeys((row["ratio"], row["method"], row["position"]) for row in rows):
        same = [r for r in rows if (r["ratio"], r["method"], r["position"]) == key]

        def mean(name: str, some: list[dict[str, Any]] = same) -> float:
            return sum(row[name] for row in some) / len(some)

        loss, base = mean("loss"), mean("base_loss")
        numbers = [f"{loss:.4f}", f"{loss - base:+.4f}", f"{100 * mean('top1'):.2f}"]
        lines.append([f"{key[0]:.2f}", *key[1:], *numbers, f"{mean('divergence'):.4f}"])
    given = {**plain(args), "data": Path(args.data).name}
    command = "python -m reproduction.benchmarks.rotary_positions " + " ".join(sys.argv[1:])
    command = command.replace(args.data, Path(args.data).name)
    about = {"command": command, "options": given, "date": time.strftime("%Y-%m-%d"), **machine()}
    write_rows(args.output, about, rows, table(head, lines))


if __name__ == "__main__":
    main()
