"""`ltm serve`: see merging in a browser."""

from __future__ import annotations

import dataclasses
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ltm.files import check_folder, write_metrics
from ltm.models import ModelSource

if TYPE_CHECKING:
    from torch import nn

    from ltm.web.networks import Network


def serve(
    *,
    run: Path | None = None,
    model: str | None = None,
    pretrained: bool = False,
    weights: Path | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    model_args: tuple[str, ...] = (),
    class_names: Path | None = None,
    crop_ratio: float | None = None,
    embedded: tuple[Literal["ViT", "Swin"], ...] = ("ViT", "Swin"),
    host: str = "127.0.0.1",
    port: int = 7860,
    output: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Show merging in a browser: pictures, groups, weights, predictions, cost and time.

    Works without a network: two small networks, trained on generated shapes, come with the package.
    A network of one's own comes first in the list. Only this machine can see the page unless --host
    says otherwise. Ctrl-C ends it.

    Example:
        ltm serve
        ltm serve --run runs/small --port 8000

    Args:
        run: a saved network.
        model: timm's name of a network, where there is no run.
        pretrained: take timm's own weights.
        weights: take those of a file in timm's keys, .safetensors or .pth; nothing is unpickled.
        num_classes: by default what the weights have.
        image_size: by default what the model was made for.
        model_args: further arguments of the model, such as depth=4.
        class_names: text file, one name a line, or JSON; by default what is known.
        crop_ratio: evaluation crop as a share of the resized side; by default the model's.
        embedded: embedded networks to offer beside it.
        host: address to listen on; 0.0.0.0 lets other machines see the page.
        port: port to listen on.
        output: folder for metrics.json, written at the end.
        overwrite: replace another run's results there.
    """
    check_folder(output, overwrite=overwrite)
    _check_free(host, port)
    if run is None and model is None and not embedded:
        raise ValueError("embedded: there is no network to show; name one, or give --run")

    from ltm.web.embedded import embedded_network
    from ltm.web.networks import Gallery
    from ltm.web.server import serving

    networks = [embedded_network(name) for name in embedded]
    if run is not None or model is not None:
        network = ModelSource(
            model=model,
            pretrained=pretrained,
            weights=weights,
            run=run,
            num_classes=num_classes,
            image_size=image_size,
            model_args=model_args,
        ).load()
        networks.insert(0, own_network(network, model, run, class_names, crop_ratio))
    began = time.monotonic()
    gallery = Gallery({network.name: network for network in networks})
    with serving(gallery, host=host, port=port) as server:
        print(f"Serving on {server.address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
        # Services are ended so; the temporary folder must go then too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        server.wait()
        desk = server.desk
        counts = {"requests": desk.num_requests, "refused": desk.num_refused}
    write_metrics(output, {**counts, "seconds": round(time.monotonic() - began, 1)})


def _check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before anything is loaded."""
    if not 0 < port < 65536:
        raise ValueError(f"port is {port}: it must be between 1 and 65535")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"port {port} on {host} cannot be used: {reason}") from error


def own_network(
    network: nn.Module,
    model: str | None,
    run: Path | None,
    class_names: Path | None,
    crop_ratio: float | None,
) -> Network:
    """A network that somebody brought, with what is known about its images and classes."""
    from ltm.deployment.information import describe, read_class_names, saved_class_names
    from ltm.web.networks import as_network

    names = saved_class_names(run) if run is not None else None
    if class_names is not None:
        names = read_class_names(class_names)
    known = describe(network, class_names=names)
    spec = known.spec
    if crop_ratio is not None:
        spec = dataclasses.replace(spec, crop_ratio=crop_ratio)
    return as_network(model or str(run), network, spec, known.class_names)
