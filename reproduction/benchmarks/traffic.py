"""How much of a network's traffic merging can save: what is written before the first site.

    python -m reproduction.benchmarks.traffic --output results/speed/traffic.md

A network that is bound by memory rather than by arithmetic becomes about as much faster as it
writes fewer values. Counted are the outputs of all layers, for one image, without and with LTM's
static masks at 0.7 of the multiply-adds.
"""

from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import ltm
from ltm.files import write_text
from reproduction.benchmarks.recording import parser, table

NETWORKS = (
    ("vit_base_patch16_224", 224),
    ("vit_small_patch16_224", 224),
    ("swin_tiny_patch4_window7_224", 224),
    ("swin_base_patch4_window7_224", 224),
    ("mobilevit_s", 256),
    ("mobilevit_xs", 256),
    ("efficientvit_b1", 224),
    ("efficientvit_b1", 288),
)

HEAD = ("network", "px", "MACs", "written before the first site", "in all", "by memory", "by MACs")


@torch.no_grad()
def written(model: nn.Module, size: int) -> list[tuple[str, int]]:
    """Layers in the order in which they run, and how many values each writes."""
    found: list[tuple[str, int]] = []

    def note(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            found.append((name, output.numel()))

    handles = [
        layer.register_forward_hook(lambda _m, _i, output, name=name: note(name, output))
        for name, layer in model.named_modules()
        if not list(layer.children()) and "merger" not in name
    ]
    model(torch.zeros(1, 3, size, size))
    for handle in handles:
        handle.remove()
    return found


def row(name: str, size: int) -> list[str]:
    """A network's row."""
    model = timm.create_model(name).eval()
    before = written(model, size)
    config = ltm.LTM(ratio=0.7, support=ltm.Learned(), weights="uniform")
    share = ltm.merge_tokens_(model, config, size).share
    after = written(model, size)
    total, left = (sum(count for _, count in layers) for layers in (before, after))
    untouched = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        untouched += one[1]
    return [
        name,
        str(size),
        f"{share:.3f}",
        f"{untouched / total:.3f}",
        f"{left / total:.3f}",
        f"{total / left:.2f}x",
        f"{1 / share:.2f}x",
    ]


def main() -> None:
    """Count all networks, and write the table."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path, required=True)
    output: Path = options.parse_args().output
    lines = [
        "# Values written by all layers, one image, LTM static at 0.7 of the multiply-adds",
        "",
        f"timm {timm.__version__}, `python -m reproduction.benchmarks.traffic --output {output}`.",
        "",
        table(HEAD, (row(name, size) for name, size in NETWORKS)),
    ]
    write_text(output, "\n".join(lines) + "\n")
    print(output.read_text(encoding="utf-8"), flush=True)


if __name__ == "__main__":
    main()
