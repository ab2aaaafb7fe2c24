"""The page: its controls, what they do, and which uploads it accepts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
from PIL import Image

from ltm.data.decoding import decode
from ltm.data.limits import LimitError, Limits
from ltm.data.shapes import Picture
from ltm.web.inspection import Inspection, inspect
from ltm.web.networks import SAVED, Networks
from ltm.web.rendering import draw_groups, draw_token, layer_table, share_of, summary

_TITLE = "Token merging"
_INTRODUCTION = (
    "# Token merging\nA vision transformer cuts a picture into patches and makes each a token. "
    "Merging turns similar tokens into one, so the network has less to compute. Choose or upload "
    "a picture, move the share, and click a patch to see which others share its token."
)
_ROUNDS = 7
"""Timings of a picture, before and after in turn."""
RATIO = 0.5
"""Share of the multiply-adds that the page opens with."""
_QUEUE = 32
"""Requests that may wait; further ones are refused."""

Point = tuple[float, float]
"""Where somebody clicked, as shares of height and width."""


@dataclass(eq=False)
class Handlers:
    """What the page's controls call; no picture and nothing about visitors is kept."""

    networks: Networks
    pictures: Sequence[Picture]
    num_requests: int = 0
    num_refused: int = 0
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Wait for the picture that is being inspected, and inspect no more."""
        self._looking.acquire()

    def take_upload(self, path: str) -> tuple[Any, str]:
        """The uploaded picture and no message; or no change, and why it was refused."""
        self.num_requests += 1
        try:
            return read_picture(path), ""
        except RefusedUploadError as error:
            self.num_refused += 1
            return gr.skip(), f"⚠️ {error}"

    def take_example(self, event: gr.SelectData) -> tuple[Image.Image, str]:
        """The example that was chosen."""
        return self.pictures[int(event.index)].image, ""

    def last_block(self, name: str) -> int:
        """The number of a network's last block."""
        return len(self.networks[name].layout.blocks) - 1

    def look(  # noqa: PLR0917 - gradio passes what the page holds, in order
        self, path: str, name: str, method: str, ratio: float, block: int, point: Point | None
    ) -> tuple[Any, ...]:
        """All that is shown of a picture."""
        seen = self._inspect(path, name, method, ratio, _ROUNDS)
        token = draw_token(seen, block, point)
        return (
            {guess.name: guess.probability for guess in seen.before},
            {guess.name: guess.probability for guess in seen.after},
            draw_groups(seen, block),
            token.pixels,
            token.caption,
            summary(seen),
            layer_table(seen),
        )

    def look_at_network(self, path: str, name: str) -> tuple[Any, ...]:
        """What can be chosen for another network, and what it makes of the picture."""
        methods, last = self.networks[name].methods, self.last_block(name)
        ratio, block = self.ratio_of(name, methods[0], RATIO), last // 2
        return (
            gr.update(choices=list(methods), value=methods[0]),
            ratio,
            gr.update(maximum=last, value=block),
            *self.look(path, name, methods[0], ratio, block, None),
        )

    def look_at_method(self, *chosen: Any) -> tuple[Any, ...]:
        """The ratio that goes with another method, and what the method makes of the picture."""
        path, name, method, ratio, block, point = chosen
        ratio = self.ratio_of(name, method, ratio)
        return ratio, *self.look(path, name, method, ratio, block, point)

    def look_at_ratio(self, *chosen: Any) -> tuple[Any, ...]:
        """The method for another ratio: a saved network is then merged anew by its own method."""
        path, name, method, ratio, block, point = chosen
        own = self.networks[name].own_method
        if method == SAVED and own is not None:
            method = own
        return method, *self.look(path, name, method, ratio, block, point)

    def ratio_of(self, name: str, method: str, ratio: float) -> float:
        """The ratio that goes with a method, in hundredths: a saved network has its own."""
        return round(self.networks[name].saved_share, 2) if method == SAVED else ratio

    def click(  # noqa: PLR0917
        self, path: str, name: str, method: str, ratio: float, block: int, event: gr.SelectData
    ) -> tuple[Any, ...]:
        """The token under the mouse."""
        seen = self._inspect(path, name, method, ratio, rounds=0)
        point = share_of(seen, *event.index)
        token = draw_token(seen, block, point)
        return token.pixels, token.caption, point

    def _inspect(self, path: str, name: str, method: str, ratio: float, rounds: int) -> Inspection:
        """Inspect a picture; a ValueError becomes a message on the page."""
        self.num_requests += 1
        try:
            with self._looking:
                merging = self.networks.merging(name, method, ratio)
                return inspect(self.networks[name], merging, read_picture(path), rounds=rounds)
        except ValueError as error:
            self.num_refused += 1
            raise gr.Error(str(error), print_exception=False) from error


def build_page(handlers: Handlers) -> gr.Blocks:
    """Lay out the page; nothing in it is fetched from elsewhere."""
    with gr.Blocks(title=_TITLE, analytics_enabled=False, delete_cache=(600, 600)) as page:
        gr.Markdown(_INTRODUCTION)
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                controls = _controls(handlers)
            with gr.Column(scale=3):
                views = _views()
        _connect(page, handlers, controls, views)
    page.queue(max_size=_QUEUE, default_concurrency_limit=1)
    return page


def _controls(handlers: Handlers) -> SimpleNamespace:
    """What visitors choose by."""
    names = list(handlers.networks.by_name)
    methods, last = list(handlers.networks[names[0]].methods), handlers.last_block(names[0])
    ratio = handlers.ratio_of(names[0], methods[0], RATIO)
    plain: dict[str, Any] = {"interactive": False, "buttons": [], "show_label": False}
    return SimpleNamespace(
        picture=gr.Image(
            handlers.pictures[0].image,
            label="Picture",
            type="filepath",
            image_mode=None,
            format="png",
            elem_id="picture",
            **plain,
        ),
        upload=gr.UploadButton(
            "Upload a picture", file_types=["image"], size="sm", elem_id="upload"
        ),
        message=gr.Markdown(elem_id="message"),
        examples=gr.Gallery(
            [picture.image for picture in handlers.pictures],
            label="Examples",
            columns=3,
            height="auto",
            allow_preview=False,
            format="png",
            object_fit="cover",
            elem_id="examples",
            **plain,
        ),
        model=gr.Dropdown(names, value=names[0], label="Model", elem_id="model"),
        method=gr.Dropdown(methods, value=methods[0], label="Method", elem_id="method"),
        ratio=gr.Slider(
            0.1, 1.0, ratio, step=0.01, label="Share of multiply-adds", elem_id="ratio"
        ),
        block=gr.Slider(
            0, last, last // 2, step=1, precision=0, label="Tokens after block", elem_id="block"
        ),
    )  # fmt: skip


def _views() -> SimpleNamespace:
    """What visitors see, from top to bottom."""
    views = SimpleNamespace(figures=gr.HTML(elem_id="summary", padding=True))
    with gr.Row():
        views.groups = _shown("Merged groups (click a patch)", "groups")
        views.heatmap = _shown("Weights of that patch's token", "heatmap")
    views.caption = gr.Markdown(elem_id="caption")
    with gr.Row():
        views.before = gr.Label(label="Before merging", num_top_classes=5, elem_id="before")
        views.after = gr.Label(label="After merging", num_top_classes=5, elem_id="after")
    views.table = gr.HTML(elem_id="layers", padding=True)
    return views


def _shown(title: str, name: str) -> gr.Image:
    """A picture under its title: a label of gradio's would cover a corner of it."""
    with gr.Column(min_width=220):
        gr.Markdown(f"**{title}**")
        return gr.Image(
            label=title,
            format="png",
            interactive=False,
            buttons=[],
            show_label=False,
            elem_id=name,
        )


def _connect(page: gr.Blocks, handlers: Handlers, c: SimpleNamespace, v: SimpleNamespace) -> None:
    """Let the controls `c` fill the views `v`."""
    point = gr.State(None)
    chosen = [c.picture, c.model, c.method, c.ratio, c.block]
    everything = [v.before, v.after, v.groups, v.heatmap, v.caption, v.figures, v.table]
    # One at a time: a picture's time must not depend on other visitors.
    one: dict[str, Any] = {"concurrency_id": "look", "concurrency_limit": 1}
    c.upload.upload(handlers.take_upload, c.upload, [c.picture, c.message], api_name="upload")
    c.examples.select(handlers.take_example, None, [c.picture, c.message], api_visibility="private")
    seen: dict[str, Any] = {"show_progress": "minimal", "trigger_mode": "always_last", **one}
    gr.on(
        [page.load, c.picture.change, c.block.input],
        handlers.look,
        [*chosen, point],
        everything,
        api_name="look",
        **seen,
    )
    # Deciding other controls is part of the same event: of two in a row, gradio may drop the
    # second while the first is asked for again.
    for control, look, known, decided in (
        (c.model, handlers.look_at_network, [c.picture, c.model], [c.method, c.ratio, c.block]),
        (c.method, handlers.look_at_method, [*chosen, point], [c.ratio]),
        (c.ratio, handlers.look_at_ratio, [*chosen, point], [c.method]),
    ):
        control.input(look, known, [*decided, *everything], api_visibility="private", **seen)
    v.groups.select(
        handlers.click,
        chosen,
        [v.heatmap, v.caption, point],
        show_progress="hidden",
        api_visibility="private",
        **one,
    )


# --- Uploads: a file that is too large or not a picture is refused with a sentence --------------

MAX_BYTES = 20 * 2**20
_MAX_PIXELS = 50_000_000
SHOWN_SIDE = 768
"""Larger pictures are made smaller at once, since networks see less anyway."""

# What people take pictures with; Pillow's other decoders are rarely used and rarely tested.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


class RefusedUploadError(ValueError):
    """An upload that is not shown, and why."""


def read_picture(path: str | Path) -> Image.Image:
    """Read an upload: upright, in RGB, of moderate size; or raise a `RefusedUploadError`."""
    path = Path(path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RefusedUploadError(f"The file has {size / 2**20:.0f} MB; at most 20 MB are accepted.")
    limits = Limits(most_pixels=_MAX_PIXELS)
    try:
        upright = decode(
            path.read_bytes(), path.name, limits, formats=_FORMATS, draft=2 * SHOWN_SIDE
        )
    except LimitError as error:
        raise RefusedUploadError(
            f"The picture has {error.number / 1e6:.0f} megapixels; "
            f"at most {_MAX_PIXELS // 1_000_000} megapixels are accepted."
        ) from error
    except ValueError as error:
        raise RefusedUploadError(
            "The file is not a readable picture. JPEG, PNG, WebP, GIF, BMP and TIFF are accepted."
        ) from error
    upright.thumbnail((SHOWN_SIDE, SHOWN_SIDE), Image.Resampling.LANCZOS)
    return upright
