"""Damage to files: seeded, for any format.

`mutate_bytes` knows nothing of a format; `mutate_json` and `mutate_text` change what is meant.
Each takes the content of a good file and a random number generator, and returns a bad one's.
"""

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]

_WORDS = ("", "\x00", "../../etc/passwd", "/etc/passwd", "é", "\u202e", "\U0001f98a", "a" * 5000)
_NUMBERS = (0, -1, 1, 2**31, 2**32, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, 1e308, -1e-308)
_VALUES: tuple[Any, ...] = (
    *_WORDS,
    *_NUMBERS,
    float("nan"),
    float("inf"),
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"": None},
    [None] * 7,
)
_DEEP = "\ue000deep\ue000"  # stands for nesting that json.dumps could not write
_TEXTS = (b"", b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", "\u2028".encode(), b"{", b"[", b'"', b"NaN")


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Change bytes at a few places."""
    content = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        random.choice(_ON_BYTES)(content, random)
    return bytes(content)


def mutate_text(data: bytes, random: Random) -> bytes:
    """Change lines or words, sometimes single bytes."""
    if random.random() < 0.3:
        return mutate_bytes(data, random)
    separator = random.choice((b"\n", b" ", b":", b",", b"="))
    parts = data.split(separator)
    place = random.randrange(len(parts))
    value = _text(random).encode()
    replaced = random.choice((0, 1, 1))
    return separator.join((*parts[:place], value, *parts[place + replaced :]))


def mutate_json(data: bytes, random: Random) -> bytes:
    """Change values, keys and types of a JSON file, sometimes single bytes."""
    if random.random() < 0.2:
        return mutate_bytes(data, random)
    value = json.loads(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = _change_value(value, random)
    text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    depth = random.choice((500, 200_000))
    deep = random.choice((("[" * depth, "]" * depth), ('{"a":' * depth + "1", "}" * depth)))
    return text.replace(json.dumps(_DEEP), "".join(deep)).encode("utf-8", "surrogatepass")


# --- Bytes ---------------------------------------------------------------------------------------


def _place(content: bytearray, random: Random) -> int:
    """Choose a place, often near the start or the end, where headers and directories are."""
    size = max(len(content), 1)
    near = min(size, 64)
    return random.choice(
        (random.randrange(size), random.randrange(near), size - 1 - random.randrange(near))
    )


def _flip(content: bytearray, random: Random) -> None:
    if content:
        content[_place(content, random)] ^= 1 << random.randrange(8)


def _truncate(content: bytearray, random: Random) -> None:
    del content[_place(content, random) :]


def _cut(content: bytearray, random: Random) -> None:
    start = _place(content, random)
    del content[start : start + random.choice((1, 4, 64, 512))]


def _splice(content: bytearray, random: Random) -> None:
    """Copy a piece to another place."""
    start, place = _place(content, random), _place(content, random)
    piece = content[start : start + random.choice((1, 8, 64, 512))]
    overwritten = len(piece) if random.random() < 0.5 else 0
    content[place : place + overwritten] = piece


def _number(content: bytearray, random: Random) -> None:
    """Write a number as formats store it, at a place where one may be."""
    value = random.choice((0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
    kind = random.choice("BHIQ")
    packed = struct.pack(random.choice("<>") + kind, value & (256 ** struct.calcsize(kind) - 1))
    place = _place(content, random)
    content[place : place + len(packed)] = packed


def _digits(content: bytearray, random: Random) -> None:
    """Write a number as text where one is."""
    places = [place for place, byte in enumerate(content) if 48 <= byte <= 57]
    if places:
        place = random.choice(places)
        content[place : place + 1] = random.choice(
            (b"-1", b"0", b"99999999999", b"1e999", b"9" * 99)
        )


def _insert(content: bytearray, random: Random) -> None:
    place = _place(content, random)
    content[place:place] = random.choice((*_TEXTS, random.randbytes(random.choice((1, 9, 999)))))


def _empty(content: bytearray, random: Random) -> None:
    content[:] = random.choice((b"", content[:1], bytes(len(content))))


_ON_BYTES = (
    _flip,
    _flip,
    _flip,
    _number,
    _number,
    _digits,
    _splice,
    _cut,
    _insert,
    _truncate,
    _empty,
)


# --- Values --------------------------------------------------------------------------------------


def _text(random: Random) -> str:
    return random.choice(
        (*_WORDS, *map(str, _NUMBERS), "nan", "null", "true", "[" * 999, "{}", "- -")
    )


def _change_value(value: Any, random: Random) -> Any:
    """Change the value at a random place of a tree, its inner nodes included."""
    if isinstance(value, dict | list) and value and random.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = random.choice(keys)
        if random.random() < 0.75:
            value[key] = _change_value(value[key], random)
        else:
            _change_keys(value, key, random)
        return value
    return deepcopy(random.choice((*_VALUES, [value], {"a": value}, str(value), _DEEP)))


def _change_keys(value: Any, key: Any, random: Random) -> None:
    """Remove, double, rename or exchange entries."""
    kind = random.choice(("remove", "double", "rename", "exchange"))
    other = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if kind == "remove":
        del value[key]
    elif kind == "exchange":
        value[key], value[other] = value[other], value[key]
    elif isinstance(value, list):
        value.append(deepcopy(value[key]))
    else:
        value[_text(random)] = deepcopy(value[key]) if kind == "double" else value.pop(key)
