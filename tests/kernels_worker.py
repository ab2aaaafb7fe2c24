"""The Triton kernels against the plain path, as JSON: on a GPU, or with TRITON_INTERPRET=1.

A process of its own: the interpreter is chosen before Triton is imported. `kernels_worker.py 2 14`
runs the third of fourteen parts: on a GPU nearly all the time goes into compiling kernels.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

import ltm
from ltm.core.attention import Rotation, size_bias, turn
from ltm.core.bottleneck import ClassStatistics, class_membership
from ltm.core.mask_gradient import weigh
from ltm.core.matching import Rule, by_attention, match_least_harm, merge_in_order
from ltm.core.merge import GridMerge, members_of
from ltm.kernels import dispatch, triton as kernels
from ltm.kernels.dispatch import enable, is_map
from ltm.methods.base import Site
from ltm.methods.ltm.learned import Axis
from ltm.methods.ltm.step import InformativeStep
from toys import pictures, size_of, toy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "plain": {},
    "sizes": {"sized": True},
    "attention": {"attended": True},
    "padding": {"sized": True, "attended": True, "padded": True},
    "registers": {"num_prefix": 5, "attended": True, "channels": 72},
    "no prefix": {"num_prefix": 0, "sized": True, "channels": 40},
    "ties": {"attended": True, "tied": True},
    "strong protection": {"attended": True, "protection": 60.0},
    "hardly anything there": {"num_prefix": 0, "sized": True, "padded": True, "left": 2},
    "nobody leaves": {"num_leaving": 0},
    "several blocks": {"num_patches": 140, "num_leaving": 60, "sized": True, "attended": True},
    "many of all": {
        "num_patches": 24,
        "num_leaving": 12,
        "images": 17,
        "sized": True,
        "attended": True,
        "padded": True,
    },
    "one image": {"images": 1, "attended": True},
    "one image, long": {
        "images": 1,
        "num_patches": 260,
        "num_leaving": 150,
        "attended": True,
        "sized": True,
    },
    "shared sizes": {"attended": True, "shared": True},
    "given weights": {"sized": True, "attended": True, "weighed": True},
    "long with padding": {
        "num_patches": 260,
        "num_leaving": 100,
        "sized": True,
        "attended": True,
        "padded": True,
    },
    "sides": {"alternate": True, "attended": True, "num_leaving": 20},
    "long sides": {"alternate": True, "num_patches": 261, "num_leaving": 90, "sized": True},
    "more than a side": {"alternate": True, "num_patches": 260, "num_leaving": 180},
    "pruned": {"sized": True, "attended": True, "weighed": True, "prune": True},
}
LENGTHS = (2, 255, 256, 257)
"""Tokens of a sequence; Triton's interpreter takes minutes for the long ones."""
if DEVICE == "cuda" or os.environ.get("LTM_LONG") == "1":
    LENGTHS = (*LENGTHS, 1370, 4097)
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)  # NumPy has none: the interpreter multiplies its bits
SITE = {"block": 1, "depth": 4, "width": 24, "num_classes": 0, "grid": (5, 9)}
SITE |= {"num_in": 45, "num_out": 20}
MODELS = {
    "default": ltm.LTM(ratio=0.7),
    "static": ltm.LTM(ratio=0.7, support=ltm.Learned()),
    "frozen": ltm.LTM(ratio=0.7, support=ltm.Learned(), weights="uniform"),
    "informative": ltm.LTM(ratio=0.7, weights=ltm.Informative(gain=1.0)),
    "operators": ltm.LTM(
        sites=(1, 3, 4),
        counts=(25, 16, 8),
        support=ltm.Matched(
            operators=("merge", "prune_redundant", "norm"), protections=(0.0, 1.0, 2.0)
        ),
    ),
    "unimportant": ltm.LTM(
        sites=(2,), counts=(12,), support=ltm.Matched(operators=("prune_unimportant",))
    ),
}  # fmt: skip


def compare(
    num_prefix=1, channels=24, sized=False, attended=False, padded=False, tied=False, images=2,
    num_patches=45, num_leaving=25, protection=1.0, left=None, shared=False, weighed=False,
    prune=False, alternate=False, dtype=torch.float32,
):  # fmt: skip
    """The same decision, and the largest differences of weights and of merged tokens."""
    torch.manual_seed(0)
    shape = images, num_patches + num_prefix
    tokens = torch.randn(*shape, channels, device=DEVICE) + 2
    size = torch.randint(1, 6, shape, device=DEVICE).float() if sized else None
    if shared:
        size = torch.randint(1, 6, (1, shape[1]), device=DEVICE).float()
    attention = torch.rand(shape, device=DEVICE) if attended else None
    if padded:
        size[1, -4 if left is None else left :] = 0
    if tied:
        tokens[:, -8:] = tokens[:, -16:-8]
        attention[:, -16:] = 0.5
    rule = Rule(
        num_leaving=num_leaving,
        num_prefix=num_prefix,
        protection=protection,
        attended=0.5,
        alternate=alternate,
    )
    match = match_least_harm(tokens, rule, size=size, attention=attention)
    given = torch.rand(shape, device=DEVICE) if weighed else None
    weight = by_attention(given, tokens, size, attention, replace(rule, attended=0.0))
    unattended = merge_in_order(match, weight, prune=prune).weight
    weight = by_attention(given, tokens, size, attention, rule)
    merge = merge_in_order(match, weight, keep_norm=True, prune=prune)
    weights = {}
    for power in (0.0, 0.5):
        assignment, stays, leaves, goes, weights[power] = kernels.assign(
            tokens, size, attention, given, num_leaving=num_leaving, num_prefix=num_prefix,
            protection=protection, power=power, least=1e-4, prune=prune, alternate=alternate,
        )  # fmt: skip
    gone = torch.zeros_like(match.leaves).scatter(1, leaves.long(), True)
    kept = torch.ones_like(match.leaves).scatter(1, stays.long(), False)
    found = {"leaves": bool((gone == match.leaves).all() and (kept == match.leaves).all())}
    found["assignment"] = bool((assignment == merge.assignment).all())
    found["unattended"] = float((weights[0.0] - unattended).abs().max())
    found["weights"] = float((weights[0.5] - merge.weight).abs().max())
    values = torch.randn(1 if shared else images, num_patches, device=DEVICE)
    thorough = DEVICE == "cuda" or images * num_patches <= 100  # the interpreter takes its time
    for keep_norm in (True, False) if thorough else (True,):
        expected = replace(merge, keep_norm=keep_norm).apply(tokens, size, values)
        merged, merged_size, means = kernels.merge_groups(
            tokens, merge.weight, size, values, stays, leaves, goes, keep_norm=keep_norm
        )
        found[f"merged {keep_norm}"] = float((merged - expected.tokens).abs().max())
        found["sizes"] = float((merged_size - expected.sizes).abs().max())
        found["handed on"] = float((means - expected.values).abs().max())
    if thorough:
        merged, _, means = kernels.merge_groups(
            tokens, merge.weight, size, None, stays, leaves, goes, keep_norm=False
        )
        found["without values"] = bool((merged - expected.tokens).abs().max() < 1e-5)
        found["without values"] &= means.numel() == 0
    return found


def gathered(images, num_tokens, dtype):
    """The product with a constant matrix of few tokens a row: the difference."""
    torch.manual_seed(0)
    matrix = torch.rand(20, num_tokens, device=DEVICE)
    matrix *= torch.rand(matrix.shape, device=DEVICE) > 0.9
    tokens = torch.randn(images, num_tokens, 40, device=DEVICE).to(dtype)
    who, share = members_of(matrix.to(dtype))
    found = kernels.gather(tokens, who, share).float()
    expected = matrix.to(dtype).float() @ tokens.float()
    return float((found - expected).abs().max() / expected.abs().max())


def decided(images, offset, dtype):
    """How many places are those of the plain path, of tokens that have much in common."""
    torch.manual_seed(0)
    tokens = torch.randn(images, 46, 40, device=DEVICE).add(offset).to(dtype)
    match = match_least_harm(tokens.float(), Rule(num_leaving=25, num_prefix=1))
    expected = merge_in_order(match, tokens.new_ones(images, 46).float()).assignment
    found = kernels.assign(tokens, None, None, None, 25, 1, 0.0, 0.0, 1e-4, prune=False)[0]
    return float((found == expected).float().mean())


def poisoned(value):
    """A token that is not finite: whether both paths agree, how many join it, if it leaves."""
    torch.manual_seed(0)
    tokens = torch.randn(2, 46, 24, device=DEVICE)
    tokens[0, 8, 3] = value
    attention = torch.rand(2, 46, device=DEVICE)
    match = match_least_harm(tokens, Rule(num_leaving=25, num_prefix=1, protection=1.0),
                             attention=attention)  # fmt: skip
    expected = merge_in_order(match, torch.ones_like(attention)).assignment
    found = kernels.assign(tokens, None, attention, None, 25, 1, 1.0, 0.0, 1e-4, prune=False)[0]
    return [
        bool((found == expected).all()),
        *(int((places[0] == places[0, 8]).sum()) - 1 for places in (expected, found)),
        bool(match.leaves[0, 8]),
    ]


def long(num_patches, dtype, alternate=False):
    """Any number of tokens: how much of who leaves and of where to is as in the torch definition.

    That gets the same numbers in float32; in half precision kernels round products as it does.
    """
    torch.manual_seed(0)
    shape, r = (2, num_patches + 1), num_patches // 3
    tokens = torch.randn(*shape, 16, device=DEVICE).to(dtype)
    size = torch.randint(1, 4, shape, device=DEVICE).float()
    attention = torch.rand(shape, device=DEVICE)
    rule = Rule(num_leaving=r, num_prefix=1, protection=1.0, alternate=alternate)
    match = match_least_harm(tokens.double(), rule, size=size, attention=attention)
    found = kernels.assign(
        tokens, size, attention, None, r, 1, 1.0, 0.0, 1e-4, prune=False, alternate=alternate
    )
    gone = torch.zeros_like(match.leaves).scatter(1, found.leaves.long(), True)
    target = found.stays.long().gather(1, found.assignment)
    both = gone & match.leaves
    near = target[both] == match.target[both]
    return [float((gone == match.leaves).float().mean()), float(near.float().mean()) if r else 1.0]


def repeat():
    """Many images in half precision: whether every call says the same, and how far it is right."""
    torch.manual_seed(0)
    tokens = torch.randn(128, 197, 384, device=DEVICE, dtype=torch.float16)
    attention = torch.rand(128, 197, device=DEVICE)
    rule = Rule(num_leaving=60, num_prefix=1, protection=1.0)
    match = match_least_harm(tokens.float(), rule, attention=attention)
    expected = merge_in_order(match, torch.ones_like(attention)).assignment
    found = [
        kernels.assign(tokens, None, attention, None, 60, 1, 1.0, 0.0, 1e-4, prune=False)[0]
        for _ in range(20)
    ]
    same = all(bool((other == found[0]).all()) for other in found)
    return [same, float((found[0] == expected).float().mean())]


def attend(num_tokens, shared=False, dtype=torch.float32, batch=2, width=24, power=0.9):
    """Attention and importance against torch's own, in float32: the largest difference of each."""
    torch.manual_seed(0)
    heads = 2
    qkv = torch.randn(batch, num_tokens, 3 * heads * width, device=DEVICE)
    size = torch.randint(0, 6, (1 if shared else batch, num_tokens), device=DEVICE).float()
    query, key, value = qkv.unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
    bias = size_bias(size, qkv.dtype, power)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    found = kernels.attention(qkv.to(dtype), size, heads, width**-0.5, power)
    apart = (x.to(dtype).transpose(1, 2) for x in (query, key, value))
    same = kernels.attention_of(*apart, size, width**-0.5, power)
    found = torch.where((same - found).abs() < 2e-3, found, torch.nan)  # both ways agree
    scores = query[:, :, :1] @ key.mT * width**-0.5 + bias
    received = scores.softmax(dim=-1).mean(dim=1)[:, 0]
    return [
        float((found - expected.transpose(1, 2).flatten(2)).abs().max()),
        float((kernels.importance(qkv, size, heads, width**-0.5, power) - received).abs().max()),
    ]


@torch.no_grad()
def turned(halves, heads, placed, dtype=torch.float32):
    """Turned queries by the kernel, and by torch."""
    torch.manual_seed(0)
    x = torch.randn(2, 23, 3, 2 * 20, device=DEVICE).to(dtype)[..., :20]
    angles = torch.randn(1, heads, 40, 2 * 20, device=DEVICE)
    positions = torch.stack([torch.randperm(40)[:23] + 3 for _ in range(2)]).to(DEVICE)
    rotation = Rotation(*angles.chunk(2, dim=-1), num_prefix=3, halves=halves, positions=positions)
    if not placed:
        sines, cosines = (half[:, :, :20] for half in angles.chunk(2, dim=-1))
        rotation = Rotation(sines, cosines, num_prefix=3, halves=halves)
    expected = turn(x, rotation)
    enable()
    try:
        found = turn(x, rotation)
    finally:
        enable(False)
    return float((found - expected).abs().max())


def informed(num_classes, width, **settings):
    """An informative step with statistics."""
    torch.manual_seed(0)
    site = replace(Site(**SITE, num_prefix=0), num_classes=num_classes, width=width)
    step = InformativeStep(site, width, ltm.Informative(gain=1.0, **settings)).to(DEVICE)
    features = torch.randn(4 * num_classes, width, device=DEVICE) + 1
    labels = torch.arange(4 * num_classes, device=DEVICE) % num_classes
    for _ in range(2):  # memberships need centroids
        statistics = ClassStatistics.zeros(num_classes, width, device=DEVICE)
        known = bool(step.present.any())
        near = class_membership(features, step.centroids, 10.0, step.present) if known else None
        statistics.update(features, labels, near)
        step.set_statistics_(statistics)
    return step


@torch.no_grad()
def inform(num_classes, images, dtype, autocast=False, num_tokens=40, width=72, k=1, **settings):
    """The informative step against the plain one: logits and weights."""
    step = informed(num_classes, width, **settings)
    tokens = torch.randn(images, num_tokens, width, device=DEVICE) + 1
    size = torch.randint(1, 6, (images, num_tokens), device=DEVICE).float()
    size[1:, -7:] = 0.0  # padding
    carry = torch.randn(images, num_tokens - k, device=DEVICE)
    expected, weights = weigh(tokens, size, carry, step.step(None), k)
    known = step.to(dtype).step(None).arguments()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        logits, weight = kernels.inform(tokens.to(dtype), size, carry, *known, k)
    return [
        float((logits - expected).abs().max()),
        float((weight / weights - 1)[weights > 0].abs().max()),
    ]


@torch.no_grad()
def placed(images, k, dtype, prune=False, bare=False, num_leaving=15, **settings):
    """Weighing and placing at once, against one after the other: places, weights, logits."""
    known = informed(20, 24, **settings).to(dtype).step(None).arguments()
    tokens = (torch.randn(images, 40 + k, 24, device=DEVICE) + 1).to(dtype)
    size = None if bare else torch.randint(1, 6, tokens.shape[:2], device=DEVICE).float()
    if size is not None:
        size[1:, -7:] = 0.0  # padding
    carry = None if bare else torch.randn(images, 40, device=DEVICE)
    attention = torch.rand(tokens.shape[:2], device=DEVICE)
    leaving = num_leaving, k, 1.0, 0.5, 1e-4, prune
    logits, weight = kernels.inform(tokens, size, carry, *known, k)
    expected = kernels.assign(tokens, size, attention, weight, *leaving)
    found = kernels.inform_and_assign(tokens, size, attention, carry, *known, *leaving)
    same = all(torch.equal(x, y) for x, y in zip(found[:4], expected[:4], strict=True))
    return [
        same,
        float((found[4] - expected[4]).abs().max() / expected[4].abs().max()),
        float((found[5] - logits).abs().max()),
    ]


@torch.no_grad()
def grid(sides, places, channels, weighed, images=3, dtype=torch.float32, as_map=False):
    """The merge of a grid against the plain one in float32: the largest difference."""
    torch.manual_seed(0)
    rows, columns = (Axis(n, p)(n, p, 0.0).to(DEVICE) for n, p in zip(sides, places, strict=True))
    tokens = torch.randn(images, sides[0] * sides[1], channels, device=DEVICE)
    weight = torch.rand(images, sides[0] * sides[1], device=DEVICE) if weighed else None
    merge = GridMerge(rows=rows, columns=columns, weight=weight)
    expected = merge(tokens)
    enable()
    tokens = tokens.mT.contiguous().mT if as_map else tokens
    try:
        found = merge(tokens.to(dtype))
        assert is_map(found) == (as_map and images < 16)  # many images run faster channels last
        return float((found.float() - expected).abs().max())
    finally:
        enable(False)


@torch.no_grad()
def whole(config, dtype, family="vit"):
    """A network with kernels against the same one without, in float32."""
    model, images = toy(family).to(DEVICE), pictures(family, batch=3).to(DEVICE)
    model.requires_grad_(False)  # the counter cannot take views of parameters that learn
    ltm.merge_tokens_(model, config, size_of(family))
    if config.weights == ltm.Informative(gain=1.0):
        ltm.collect_statistics_(model, [(images, torch.arange(3, device=DEVICE))])
    if config.weights is None or family != "vit":
        ltm.freeze_(model)
    with FlopCounterMode(display=False) as plain_count:
        expected = model(images)
    enable()
    try:
        with FlopCounterMode(display=False) as count:
            outputs = model(images)
        if dtype is not torch.float32:
            outputs = model.to(dtype)(images.to(dtype)).float()
    finally:
        enable(False)
    plain = expected if dtype is torch.float32 else model.to(dtype)(images.to(dtype)).float()
    differences = [float((y - expected).norm() / expected.norm()) for y in (outputs, plain)]
    return [*differences, count.get_total_flops() / plain_count.get_total_flops()]


@torch.no_grad()
def captured(config):
    """A CUDA graph of a network, whose branches run side by side, against the plain path."""
    model, images = toy("vit").to(DEVICE), pictures("vit", batch=3).to(DEVICE)
    ltm.merge_tokens_(model, config, size_of("vit"))
    ltm.collect_statistics_(model, [(images, torch.arange(3, device=DEVICE))])
    given = [images.roll(step, dims=-1) for step in range(20)]
    expected = [model(x) for x in given]
    enable()
    try:
        model(images)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = model(images)
        worst = 0.0
        for x, right in zip(given, expected, strict=True):
            images.copy_(x)  # a branch that begins too early would read the last images
            graph.replay()
            worst = max(worst, float((outputs - right).norm() / right.norm()))
    finally:
        enable(False)
    return worst


def learns(config):
    """What trains on a frozen network: its gradients while the kernels are on, and without."""
    model, images = toy("vit").to(DEVICE), pictures("vit", batch=3).to(DEVICE)
    ltm.merge_tokens_(model, config, size_of("vit"))
    ltm.collect_statistics_(model, [(images, torch.arange(3, device=DEVICE))])
    model.requires_grad_(False)
    gains = [p.requires_grad_() for n, p in model.named_parameters() if n.endswith("gain")]
    found = []
    for on in (True, False):
        model.zero_grad()
        enable(on)
        model(images).square().sum().backward()
        enable(False)
        found.append([float(gain.grad) for gain in gains])
    return found


def cases():
    """Every comparison, by section and name."""
    half, single = torch.float16, torch.float32
    found = {
        "kernels": {name: partial(compare, **case) for name, case in CASES.items()},
        "attention": {
            **{str(t): partial(attend, t, shared) for t, shared in ((17, False), (197, True))},
            **{str(t): partial(attend, t) for t in (1, *LENGTHS)},
        },
        "attention in half": {
            f"{t} of {batch}": partial(attend, t, dtype=half, batch=batch)
            for t, batch in ((17, 2), (74, 18), (140, 18), (172, 2), (200, 18), (300, 2), (384, 2))
        }
        | {
            f"heads of {width}": partial(attend, t, dtype=half, width=width)
            for t, width in ((300, 64), (140, 72), (140, 128))
        }
        | {"few of size zero count": partial(attend, 33, power=0.5)},
        "turned": {
            f"{halves} {heads} {placed}": partial(turned, halves, heads, placed)
            for halves in (False, True)
            for heads, placed in ((1, True), (3, True), (1, False))
        },
        "rotary": {
            family: partial(whole, ltm.LTM(ratio=0.8, weights="uniform"), single, family)
            for family in ("eva", "eva02", "naflex_rotary")
        },
        "inform": {
            **{
                f"{y} of {images}": partial(inform, y, images, single)
                for y, images in ((3, 17), (130, 2), (1000, 1), (1030, 2))
            },
            "autocast": partial(inform, 70, 18, single, autocast=True),
            "large maps": partial(inform, 3, 16, single, num_tokens=1100, width=8, k=0),
            "raw": partial(inform, 9, 2, single, k=5, step="raw"),
        },
        "inform half": {
            "few": partial(inform, 150, 2, half),
            "many": partial(inform, 150, 18, half),
        },
        "placed": {
            "no prefix": partial(placed, 2, 0, single),
            "pruned": partial(placed, 2, 1, single, prune=True),
            "registers": partial(placed, 2, 5, single, bare=True, step="raw"),
            "nobody leaves": partial(placed, 1, 1, single, num_leaving=0),
            "many": partial(placed, 17, 1, half),
        },
        "long": {
            f"{t} {dtype} {alternate}": partial(long, t - 1 or 1, dtype, alternate)
            for t in LENGTHS
            for dtype in (DTYPES if DEVICE == "cuda" or t < 1000 else [half])
            for alternate in (False, t > 2)
        },
        "gathered": {
            f"{images} {dtype}": partial(gathered, images, num_tokens, dtype)
            for images, num_tokens in ((17, 77), (3, 37))
            for dtype in (single, half)
        },
        "poisoned": {str(value): partial(poisoned, value) for value in (torch.nan, torch.inf)},
        "decided": {
            f"{images} {offset}": partial(decided, images, offset, dtype)
            for images, offset, dtype in ((16, 2, half), (16, 20, single), (2, 20, single))
        },
        "grids": {
            "even": partial(grid, (8, 8), (6, 6), 40, weighed=False),
            "odd": partial(grid, (9, 17), (5, 9), 72, weighed=True),
            "odd map": partial(grid, (9, 17), (5, 9), 72, weighed=True, as_map=True),
            "even map": partial(grid, (8, 8), (6, 6), 40, weighed=False, as_map=True),
            "one channel": partial(grid, (4, 33), (4, 20), 1, weighed=True),
            "many": partial(grid, (4, 5), (3, 5), 130, weighed=True, images=16),
            "many maps": partial(grid, (4, 5), (3, 5), 40, weighed=False, images=16, as_map=True),
        },
        "grids in half": {
            f"{channels} {weighed}": partial(
                grid, (4, 5), (3, 5), channels, weighed, images=16, dtype=half
            )
            for channels, weighed in ((40, True), (130, True), (130, False))
        },
        "families": {
            f"{family} {name}": partial(whole, ltm.LTM(ratio=0.8, weights=weights), single, family)
            for family in ("swin", "mobilevit", "efficientvit")
            for name, weights in (
                ("informative", ltm.Informative(gain=1.0)),
                ("uniform", "uniform"),
            )
        },
        "learns": {name: partial(learns, MODELS[name]) for name in ("informative", "operators")},
        "models": {name: partial(whole, config, single) for name, config in MODELS.items()},
    }
    if DEVICE == "cuda":
        found["half"] = {n: partial(whole, config, half) for n, config in MODELS.items()}
        found["repeated"] = {"128": repeat}
        found["captured"] = {n: partial(captured, MODELS[n]) for n in ("informative", "operators")}
    return found


def main(part=0, parts=1):
    """Every `parts`-th comparison, from `part` on."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    enable(False)
    if DEVICE == "cpu":
        dispatch._runs_on = lambda _: True
    named = [(section, name, run) for section, of in cases().items() for name, run in of.items()]
    results = {}
    for section, name, run in named[part::parts]:
        results.setdefault(section, {})[name] = run()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
