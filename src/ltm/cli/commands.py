"""What commands share. A command is a verb of the library, its settings read from options.

How a command is made:

1. The verb is a function of the library, `verb(model, data, settings=Settings(), **changes)`, in
   the package it belongs to. `model` goes through `models.open_model`, `changes` through
   `models.changed`. It prints nothing: a `say` that it is given gets plain lines.
2. Its settings are a frozen, keyword-only dataclass in a module that imports no torch. Field
   docstrings are the help, field names and defaults are those of the options.
3. Its result is a frozen dataclass with `save(folder)` and a `__repr__` that a person reads.
4. `ltm/__init__.py` names verb, settings and result, so that `ltm.verb` works in a notebook.
5. `cli/<name>.py` has one function `<name>(source: Flat[ModelSource], settings: Flat[...], *,
   data, output, overwrite)`. Its docstring holds an example. Inside `with
   output_folder(output, ...)` it imports and calls the verb with `say=say`, prints the result and
   saves it.
6. `COMMANDS` gets a line. Bad input is an exception of `BAD_INPUT`: one sentence, exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args

import tyro

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]
"""A group of settings whose names are options as they are."""

OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
"""A path that may be left out; the help does not show "{None}|PATH" and "(default: None)"."""
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Words = Annotated[
    tuple[str, ...] | None, tyro.conf.arg(metavar="[STR [STR ...]]", help_behavior_hint="")
]

Inputs = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="INPUT [INPUT ...]", help_behavior_hint=""),
]
_KINDS = {str: "STR", int: "INT", float: "FLOAT", Path: "PATH", bool: "{True,False}"}

OPTIONS = tyro.constructors.ConstructorRegistry()
"""How tyro reads settings, which do not import it: by the metadata of their fields."""
_asked: list[type] = []


@OPTIONS.struct_rule
def _by_metadata(
    info: tyro.constructors.StructTypeInfo,
) -> tyro.constructors.StructConstructorSpec | None:
    """Read a dataclass as tyro does, then rename its options by the metadata of its fields."""
    if not dataclasses.is_dataclass(info.type) or info.type in _asked:
        return None
    _asked.append(info.type)
    try:
        spec: Any = OPTIONS.get_struct_spec(info)
    finally:
        _asked.pop()
    known = {field.name: field.metadata for field in dataclasses.fields(info.type)}
    fields = [
        dataclasses.replace(
            field,
            type=_named(field.type, known[field.name], field.default),
            helptext=partial(_in_one_line, field.helptext),
        )
        for field in spec.fields
    ]
    return dataclasses.replace(spec, fields=tuple(fields))


def _in_one_line(text: Callable[[], str | None] | str | None) -> str | None:
    """A docstring without its line breaks, which tyro would keep."""
    text = text() if callable(text) else text
    return None if text is None else " ".join(text.split())


def _named(kind: Any, metadata: Mapping[str, Any], default: Any) -> Any:
    hint = "" if default in (None, ()) else None
    if default == ():
        kind = _with_values(kind)
    if not dataclasses.is_dataclass(kind):
        kind = Annotated[kind, tyro.conf.arg(metavar=_metavar(kind), help_behavior_hint=hint)]
    if dataclasses.is_dataclass(kind) and not metadata.get("prefixed"):
        return Annotated[kind, tyro.conf.OmitArgPrefixes]
    if "option" not in metadata:
        return kind
    name = metadata["option"]
    return Annotated[kind, tyro.conf.Suppress if name is None else tyro.conf.arg(name=name)]


def _with_values(kind: Any) -> Any:
    """Refuse an option without values where leaving it out already means none."""
    spec: Any = OPTIONS.get_primitive_spec(tyro.constructors.PrimitiveTypeInfo.make(kind, set()))

    def read(words: list[str]) -> Any:
        if not words:
            raise ValueError("give at least one value, or leave the option out")
        return spec.instance_from_str(words)

    return Annotated[kind, dataclasses.replace(spec, instance_from_str=read)]


def _metavar(kind: Any) -> str | None:
    """Return what stands for a value that may be left out: STR, not {None}|STR."""
    kinds = [part for part in get_args(kind) if part is not type(None)]
    if not isinstance(kind, UnionType) or len(kinds) != 1:
        return None
    words = [_KINDS.get(part, "") for part in get_args(kinds[0]) or kinds]
    return " ".join(words) if all(words) else None


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The file that a training starts from, and the folder that it writes."""

    config: Path | None = None
    """YAML file of settings, such as the config.yaml of an earlier run."""
    output: Path
    """Folder of the run."""
    resume: Literal["auto", "never"] = "never"
    """auto continues from the last complete checkpoint in output, if there is one."""
    overwrite: bool = False
    """Start over in a folder that holds a run."""

    def keywords(self) -> dict[str, Any]:
        """The arguments of a training verb; the file is read ahead of the options."""
        return {"output": self.output, "resume": self.resume, "overwrite": self.overwrite}


def read_ahead(options: Sequence[str], *names: str) -> dict[str, str | None] | None:
    """Read options that decide the defaults of others; None if the full parser will refuse them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}")
    try:
        return vars(parser.parse_known_args(options)[0])
    except argparse.ArgumentError:
        return None


def say(line: str) -> None:
    """Print one line of progress."""
    print(line, flush=True)


def interrupted(line: str) -> NoReturn:
    """End a command that Ctrl-C stopped, after what was done is saved."""
    say(line)
    raise KeyboardInterrupt


def command_line(name: str, *groups: Any, **options: Any) -> str:
    """The call that repeats a run: every option that differs from its default.

    `groups` are settings, `options` further ones that were given.
    """
    words = ["ltm", name]
    values = dict(options)
    for group in groups:
        for field in dataclasses.fields(group):
            if getattr(group, field.name) != field.default:
                values[field.name] = getattr(group, field.name)
    for option, value in values.items():
        flag = f"--{option.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [flag, str(value)]
    return shlex.join(words)
