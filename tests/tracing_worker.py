"""Compile and export every case without the shape assertions of the tests, and print what came out.

A process of its own: tracers cannot see through the assertions that the test session installs.
"""

import json
import sys
import warnings
from contextlib import suppress
from typing import Any

import torch

import ltm
from ltm.api import mergers
from ltm.kernels import dispatch
from toys import TOYS, VARIANTS, pictures, size_of, toy

SHARES = {"swin": 0.8, "swinv2": 0.8, "swinv2_cr": 0.8, "mobilevit": 0.6, "efficientvit": 0.6}
"""What is kept by each block; elsewhere 0.9."""
CASES = {
    "vit-ltm-learned": ("vit", ltm.LTM(per_block=0.9, support=ltm.Learned())),
    "vit-tome": ("vit", ltm.ToMe(per_block=0.9)),
    "vit-tofu": ("vit", ltm.ToFu(per_block=0.9)),
    "vit-ltmp": ("vit", ltm.LTMP(per_block=0.9)),
}
EXPORTED = tuple(f"{name}-ltm" for name in TOYS | VARIANTS)
"""The methods on a ViT are exported in the tests of files."""
CASES |= {
    f"{name}-ltm": (name, ltm.LTM(per_block=SHARES.get(name, 0.9))) for name in TOYS | VARIANTS
}


def short(name: str) -> torch.nn.Module:
    """A toy of two blocks where it has more of one kind: tracing takes time for each."""
    model: Any = toy(name)
    if hasattr(model, "blocks"):
        model.blocks = model.blocks[:2]
    return model


def prepared(case: str) -> tuple[torch.nn.Module, torch.Tensor]:
    name, config = CASES[case]
    model, images = short(name), pictures(name, batch=3)
    ltm.merge_tokens_(model, config, size_of(name))
    if config.name == "ltm" and getattr(model, "num_classes", 0):
        ltm.collect_statistics_(model, [images])
    if config.name == "ltmp":
        for _, merger in mergers(model):
            merger.merge_threshold.data.fill_(0.5)
            merger.prune_threshold.data.fill_(0.3 / merger.site.num_in)
    return model, images


def compiled(case: str) -> float:
    model, images = prepared(case)
    expected = model(images)
    torch._dynamo.reset()
    out = torch.compile(model, fullgraph=True, backend="eager")(images)
    # The model itself goes on working, with another batch too.
    model(images[:1])
    return float((out - expected).abs().max())


def exported(case: str) -> float:
    model, images = prepared(case)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},)).module()
    other = torch.cat([images, images.flip(-1)])
    return float((program(other) - model(other)).abs().max())


def operators(graph: torch.fx.GraphModule) -> list[str]:
    """Our own operators in a graph."""
    return sorted({str(node.target) for node in graph.graph.nodes if "ltm." in str(node.target)})


def with_kernels(case: str) -> dict[str, list[str]]:
    """Our operators in the compiled and in the exported graph, where kernels would run."""
    model, images = prepared(case)
    ltm.freeze_(model)
    found: dict[str, list[str]] = {}

    def look(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        found["compiled"] = operators(graph)
        return graph

    runs_on, dispatch._runs_on = dispatch._runs_on, lambda _: True
    try:
        torch._dynamo.reset()
        with suppress(Exception):  # traced whole, but there is nothing that could run it
            torch.compile(model, fullgraph=True, backend=look)(images)
        found["exported"] = operators(torch.export.export(model, (images,)).graph_module)
    finally:
        dispatch._runs_on = runs_on
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    with torch.no_grad():
        for case in sys.argv[1:] or CASES:
            for trace in (compiled, exported) if case in EXPORTED else (compiled,):
                try:
                    results[f"{case}-{trace.__name__}"] = trace(case)
                except Exception as error:  # noqa: BLE001
                    # The test says which case failed, and why.
                    results[f"{case}-{trace.__name__}"] = repr(error)[:2000]
        if not sys.argv[1:]:
            for case in ("vit-ltm", "vit-ltm-learned", "efficientvit-ltm"):
                results[f"{case}-kernels"] = with_kernels(case)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
