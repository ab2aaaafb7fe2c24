"""Films: how the patches of an image become fewer tokens, block after block."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image

from ltm.report.heatmaps import Traces, maps_at
from ltm.report.pictures import Pixels, Scenes, captioned, enlarge, paint_groups

_FRAME_MILLISECONDS = 900


def layer_frames(scenes: Scenes, traces: Traces, index: int) -> list[Image.Image]:
    """One frame per merging block of any method: their groups in one image, side by side."""
    pixels = enlarge(scenes.pixels[index])
    names = list(traces)
    frames = [captioned([pixels] * len(names), [f"{name}: image" for name in names])]
    for block in merging_blocks(traces):
        maps = maps_at(traces, block, len(scenes))
        pictures: list[Pixels] = []
        captions: list[str] = []
        for name, site in maps.items():
            pictures.append(paint_groups(pixels, site.group_grid(index)))
            captions.append(f"{name}, block {block}: {site.num_tokens(index)} tokens")
        frames.append(captioned(pictures, captions))
    return frames


def merging_blocks(traces: Traces) -> list[int]:
    """The blocks in which at least one method merges."""
    return sorted({site.block for maps in traces.values() for site in maps})


def film_bytes(frames: Sequence[Image.Image]) -> bytes:
    """Frames as an endless GIF; the last one stays longer."""
    durations = [_FRAME_MILLISECONDS] * (len(frames) - 1) + [2 * _FRAME_MILLISECONDS]
    # One palette for all frames: otherwise colours flicker from block to block.
    sheet = Image.new("RGB", (frames[0].width, sum(frame.height for frame in frames)))
    for index, frame in enumerate(frames):
        sheet.paste(frame, (0, index * frame.height))
    palette = sheet.quantize(256)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    first.save(
        buffer, format="GIF", save_all=True, append_images=others, duration=durations, loop=0
    )
    return buffer.getvalue()
