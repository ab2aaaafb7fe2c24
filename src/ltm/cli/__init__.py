"""The command line `ltm`. `ltm.cli.commands` tells how a command is made."""

import errno
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from ltm.extras import MissingExtraError, named
from ltm.files import command_words
from ltm.interruption import INTERRUPTED, end, leave, whole_command

COMMANDS = {
    "demo": "Compress a network that comes with the package: no download, about a minute.",
    "compress": "Make a trained network faster, and report what it gains and loses.",
    "calibrate": "Find the best places to merge in a network, on images without labels.",
    "evaluate": "Compare the accuracy and cost of methods on the same images.",
    "benchmark": "Measure how much faster merging is on this machine.",
    "visualize": "Draw which patches merge into which token.",
    "export": "Write a network as an ONNX, torch.export or OpenVINO file, in float or int8.",
    "predict": "Classify images with a saved network or an ONNX file.",
    "embed": "Write embeddings and classes of any number of images as Parquet files.",
    "serve": "Show in a browser what merges, and what it does to predictions and time.",
    "finetune": "Convert a pretrained network and train its mask modules.",
    "train": "Train a token-merging network from scratch on labelled images.",
    "detect": "Train, evaluate or run SSDLite, an object detector, on a merging backbone.",
    "segment": "Train, evaluate or run Mask R-CNN (boxes and masks) on a merging backbone.",
    "table": "Repeat the experiment behind a table or figure of the paper.",
}

BAD_INPUT = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""Errors of the user: they end a command with one sentence and exit code 2."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 2 for bad input (with one sentence on standard error) or 130."""
    try:
        with whole_command():
            code = _run(list(sys.argv[1:] if args is None else args))
    except KeyboardInterrupt:
        print("ltm: stopped by Ctrl-C", file=sys.stderr)
        if args is None:
            end()
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if not isinstance(missing := named(error), MissingExtraError):
            raise
        print(f"ltm: {missing}", file=sys.stderr)
        code = 2
    return leave(code) if args is None else code


def _run(args: list[str]) -> int:
    import tyro

    if not args or args[0] not in COMMANDS:
        # Nothing runs: tyro prints the list of commands, or what is wrong, and exits.
        tyro.extras.subcommand_cli_from_dict(
            {name: _entry(summary) for name, summary in COMMANDS.items()},
            prog="ltm",
            description="Make vision transformers faster by merging tokens.",
            args=args,
        )
        return 0
    name, *options = args
    told = command_words.set(shlex.join(["ltm", *args]))
    try:
        module = import_module(f"ltm.cli.{name}")
        # Some commands have defaults that follow from their options, such as a recipe.
        prepared = hasattr(module, "prepare")
        command = module.prepare(options) if prepared else getattr(module, name)
        with import_module("ltm.cli.commands").OPTIONS:
            tyro.cli(command, prog=f"ltm {name}", description=_description(command), args=options)
    except BrokenPipeError:  # the reader has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except BAD_INPUT as error:
        print(f"ltm {name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            said = f"{error.filename!s:.40}... is too long for the name of a file"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = "" if error.filename is None else f" for {error.filename}"
            said = f"no space left{place}: free some, and start again"
        else:
            raise
        print(f"ltm {name}: {said}", file=sys.stderr)
        return 2
    finally:
        command_words.reset(told)
    return 0


def _entry(summary: str) -> Callable[[], None]:
    """A stand-in for a command, so that the list of commands imports none of them."""

    def entry() -> None: ...

    entry.__doc__ = summary
    return entry


def _description(command: Callable[..., object]) -> str:
    """Return the docstring up to its arguments, which tyro shows beside the options."""
    return (inspect.getdoc(getattr(command, "func", command)) or "").split("\nArgs:\n")[0].rstrip()
