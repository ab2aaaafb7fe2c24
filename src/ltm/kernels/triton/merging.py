"""The merge: into the places that a matching gave, or by a constant matrix.

Letters: b images, t tokens with their k prefix tokens, p tokens that stay (prefix included), r
tokens that leave, c channels.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# ruff: noqa: PLR0917 - a kernel's arguments are its launch, in order
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ltm.kernels.triton.launch import FEW_IMAGES, fitting, parts_of, sizes_of

_MOST_AT_ONCE = 512
"""How many leaving tokens a program reads at once."""


@triton.jit
def _found(values, token, there, otherwise, KNOWN: tl.constexpr):
    """A value of a token, or a default if there are no values."""
    found = otherwise
    if KNOWN:
        found = tl.load(values + token, mask=there, other=otherwise).to(tl.float32)
    return found


@triton.jit
def _merge_kernel(
    tokens, weight, size, values, stays, leaves, goes, merged, merged_size, means, t, p, r, c,
    k, weight_stride, size_stride, value_stride,
    KEEP_NORM: tl.constexpr, HAS_SIZE: tl.constexpr, HAS_VALUES: tl.constexpr,
    LEAVING: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One merged token with its size and value; of the leaving tokens only its members are read."""
    image, place = tl.program_id(0) // p, tl.program_id(0) % p
    weight += image * weight_stride
    size += image * size_stride
    values += image * value_stride - k
    turns, channels = tl.arange(0, LEAVING), tl.arange(0, CHANNELS)
    own = tl.load(stays + image * p + place)
    start = tokens + image.to(tl.int64) * t * c + channels
    x = tl.load(start + own * c, mask=channels < c, other=0.0)  # comes while others are looked for
    share = tl.load(weight + own)
    total = share
    counted = tl.where(share > 0, _found(size, own, True, 1.0, HAS_SIZE), 0.0)
    value = share * _found(values, own, place >= k, 0.0, HAS_VALUES)
    out = x.to(tl.float32)
    largest = tl.where(share > 0, tl.sum(out * out, axis=0), 0.0)
    out = out * share
    number = 0
    for first in range(0, r, LEAVING):
        into = tl.load(goes + image * r + first + turns, mask=first + turns < r, other=-1)
        comes = into == place
        for before in range(0, tl.sum(comes.to(tl.int32), axis=0), TOGETHER):
            arrival = tl.cumsum(comes.to(tl.int32), axis=0) - 1  # within: to most places none comes
            order = before + tl.arange(0, TOGETHER)
            these = comes[None] & (arrival[None] == order[:, None])
            here = tl.sum(these.to(tl.int32), axis=1) > 0
            which = tl.sum(tl.where(these, turns[None], 0), axis=1)
            token = tl.load(leaves + image * r + first + which, mask=here, other=0)
            part = tl.load(weight + token, mask=here, other=0.0)
            here = here & (part > 0)  # else it is pruned
            y = tl.load(
                start[None] + token[:, None] * c,
                mask=here[:, None] & (channels < c)[None], other=0.0,
            ).to(tl.float32)  # fmt: skip
            part = tl.where(here, part, 0.0)
            out += tl.sum(part[:, None] * y, axis=0)
            total += tl.sum(part, axis=0)
            number += tl.sum(here.to(tl.int32), axis=0)
            largest = tl.maximum(largest, tl.max(tl.sum(y * y, axis=1), axis=0))
            counts = _found(size, token, here, 1.0, HAS_SIZE)
            counted += tl.sum(tl.where(here, counts, 0.0), axis=0)
            if HAS_VALUES:
                value += tl.sum(part * tl.load(values + token, mask=here, other=0.0), axis=0)
    tl.store(merged_size + image * p + place, counted)
    total = tl.maximum(total, 1e-12)
    if HAS_VALUES:
        tl.store(means + image * (p - k) + place - k, value / total, mask=place >= k)
    merged += (image.to(tl.int64) * p + place) * c + channels
    if number == 0:  # as most tokens of most merges: they only move
        tl.store(merged, tl.where(share == 0, 0.0, x), mask=channels < c)
    else:
        out = out / total
        if KEEP_NORM:
            length = tl.sqrt(tl.sum(out * out, axis=0))
            out = out * (tl.sqrt(largest) / tl.maximum(length, 1e-12))
        tl.store(merged, out.to(merged.dtype.element_ty), mask=channels < c)


@triton.jit
def _gather_kernel(
    who, share, tokens, merged, t, p, c,
    MEMBERS: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of some merged tokens, each a sum of a few tokens with constant shares."""
    image = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    valid, known = places < p, channels < c
    start = tokens + image * t * c + channels[None]
    found = tl.zeros((PLACES, CHANNELS), tl.float32)
    for member in tl.static_range(MEMBERS):  # pyright: ignore[reportGeneralTypeIssues]
        token = tl.load(who + places * MEMBERS + member, mask=valid, other=0)
        part = tl.load(share + places * MEMBERS + member, mask=valid, other=0.0).to(tl.float32)
        x = tl.load(
            start + token[:, None] * c, mask=(part != 0)[:, None] & known[None], other=0.0
        ).to(tl.float32)  # fmt: skip
        found += part[:, None] * x
    tl.store(
        merged + (image * p + places[:, None]) * c + channels[None],
        found.to(merged.dtype.element_ty), mask=valid[:, None] & known[None],
    )  # fmt: skip


def merge_groups(
    tokens: Tensor,
    weight: Tensor,
    size: Tensor | None,
    values: Tensor | None,
    stays: Tensor,
    leaves: Tensor,
    goes: Tensor,
    keep_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merged tokens, with the largest norm of their group if asked for, their sizes and values."""
    b, t, c = tokens.shape
    num_places = stays.shape[1]
    tokens = tokens.contiguous()
    merged = tokens.new_empty(b, num_places, c)
    merged_size = torch.empty(b, num_places, device=tokens.device, dtype=torch.float32)
    weight_, weight_stride = sizes_of(weight.float(), merged_size)
    size_, stride = sizes_of(size, merged_size)
    values_, value_stride = sizes_of(values, merged_size)
    k = 0 if values is None else t - values.shape[1]
    means = merged_size.new_empty(0 if values is None else (b, num_places - k))
    num_leaving = leaves.shape[1]
    few = b < FEW_IMAGES  # there is little other work while a program waits for memory
    _merge_kernel[(b * num_places,)](
        tokens, weight_, size_, values_, stays, leaves, goes, merged, merged_size, means,
        t, num_places, num_leaving, c, k, weight_stride, stride, value_stride,
        KEEP_NORM=keep_norm, HAS_SIZE=size is not None, HAS_VALUES=values is not None,
        LEAVING=min(fitting(num_leaving), _MOST_AT_ONCE), CHANNELS=fitting(c),
        TOGETHER=4 if few else 1, num_warps=max(4 if few else 1, fitting(c) // 1024),
    )  # fmt: skip
    return merged, merged_size, means


def gather(tokens: Tensor, who: Tensor, share: Tensor) -> Tensor:
    """Sums of a few tokens each, the same ones for every image: `who` and `share` are `p m`."""
    (b, t, c), (p, members) = tokens.shape, who.shape
    merged = tokens.new_empty(b, p, c)
    places, channels = (4, 128) if b < FEW_IMAGES else (8, min(fitting(c), 256))
    _gather_kernel[b, parts_of(p, places), parts_of(c, channels)](
        who, share, tokens.contiguous(), merged, t, p, c,
        MEMBERS=members, PLACES=places, CHANNELS=channels, num_warps=2 if b < FEW_IMAGES else 4,
    )  # fmt: skip
    return merged
