"""Damages files in the ways that an attacker or a bad disk could damage them."""

import json
import os
import random
from pathlib import Path
from typing import Any

DEEP = 100_000  # Depth of nested JSON.
_DEEP_MARK = "a list so deep that json cannot write it"
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    10**12,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "false",
    "1",
    "a" * 5_000,
    "é😀",
    "\ud83d",
    "\0",
    "\u2028",
    "../../etc/passwd",
    "/etc/passwd",
    "http://127.0.0.1:9/x",
    "file:///etc/passwd",
    "{{ 1 // 0 }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "%s",
    "os:system",
    [],
    [[]],
    [None],
    {},
    {"a": None},
    {"": ""},
    [1, "x", {}],
    _DEEP_MARK,
)


def mutate(folder: Path, chance: random.Random) -> str:
    """Damages one or two files in a folder. Returns a description of the damage."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    changes = []
    for path in chance.sample(files, min(len(files), 1 if chance.random() < 0.8 else 2)):
        change = _changed(path, chance)
        changes.append(f"{path.relative_to(folder)}: {change}")
    return "; ".join(changes)


def _changed(path: Path, chance: random.Random) -> str:
    if chance.random() < 0.06:
        return _replaced(path, chance)
    data = path.read_bytes()
    if chance.random() < 0.75:
        changed = _json_changed(path.name, data, chance)
        if changed is not None:
            path.write_bytes(changed[0])
            return changed[1]
    name = chance.choice(sorted(_BYTES))
    path.write_bytes(_BYTES[name](bytearray(data), chance))
    return name


def _replaced(path: Path, chance: random.Random) -> str:
    """Replaces a file with a different kind of file."""
    path.unlink()
    kind = chance.choice(("fifo", "folder", "nothing", "loop", "dangling", "/dev/zero", "socket"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("there_is_none")
    elif kind == "/dev/zero":
        path.symlink_to(kind)
    elif kind == "socket":
        import socket

        here = os.getcwd()
        os.chdir(path.parent)  # Paths of sockets are limited to 107 bytes.
        with socket.socket(socket.AF_UNIX) as result:
            result.bind(path.name)
        os.chdir(here)
    return f"is {kind} now"


def _flipped(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 8))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def _overwritten(data: bytearray, chance: random.Random) -> bytes:
    """Overwrites some bytes with a number, because lengths and offsets are numbers."""
    width = chance.choice((1, 2, 4, 8))
    value = chance.choice((0, 1, 0x7F, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), 12_345_678))
    size = max(1, len(data))
    near = chance.randrange(min(64, size))  # Headers are at the start or the end.
    at = chance.choice((near, size - 1 - near, chance.randrange(size)))
    data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(data)


def _random_block(data: bytearray, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) or 1)
    data[at : at + chance.choice((1, 7, 64))] = chance.randbytes(chance.choice((0, 1, 7, 64)))
    return bytes(data)


_BYTES = {
    "truncated": lambda data, chance: bytes(data[: chance.randrange(len(data) or 1)]),
    "start removed": lambda data, chance: bytes(data[chance.randrange(len(data) or 1) :]),
    "bits flipped": _flipped,
    "overwritten with a number": _overwritten,
    "a random block": _random_block,
    "emptied": lambda data, chance: b"",
    "garbage": lambda data, chance: chance.randbytes(chance.choice((1, 50, 5_000))),
    "garbage appended": lambda data, chance: bytes(data) + chance.randbytes(37),
    "written twice": lambda data, chance: bytes(data) * 2,
    "zeros": lambda data, chance: bytes(len(data)),
    "UTF-8 byte order mark": lambda data, chance: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data, chance: data.decode("latin1").encode("utf-16"),
    "contains Latin-1": lambda data, chance: bytes(data).replace(b"e", b"\xe9"),
    "contains NUL": lambda data, chance: bytes(data).replace(b" ", b"\0"),
    "deep JSON": lambda data, chance: b"[" * DEEP + b"]" * DEEP,
    "deep JSON objects": lambda data, chance: b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a long number": lambda data, chance: b"1" * 10_000,
    "PostScript": lambda data, chance: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "Windows line ends": lambda data, chance: bytes(data).replace(b"\n", b"\r\n"),
}


def _json_changed(name: str, data: bytes, chance: random.Random) -> tuple[bytes, str] | None:
    """Changes a value in JSON or JSON lines. Returns None if the data is not JSON."""
    if name.endswith(".safetensors"):
        return _header_changed(data, chance)
    lines = data.split(b"\n") if name.endswith(".jsonl") else [data]
    at = chance.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return None
    changed, words = _node_changed(value, chance)
    lines[at] = _dumped(changed)
    return b"\n".join(lines), words


def _header_changed(data: bytes, chance: random.Random) -> tuple[bytes, str] | None:
    size = int.from_bytes(data[:8], "little")
    try:
        value = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        return None
    changed, words = _node_changed(value, chance)
    text = _dumped(changed)
    return len(text).to_bytes(8, "little") + text + data[8 + size :], words


def _dumped(value: Any) -> bytes:
    text = json.dumps(value)
    deep = "[" * DEEP + "]" * DEEP
    return text.replace(json.dumps(_DEEP_MARK), deep).encode("utf-8", "surrogatepass")


def _node_changed(value: Any, chance: random.Random) -> tuple[Any, str]:
    """Returns the value with one node changed, removed, renamed, or replaced by another node."""
    root = [value]
    places = list(_places(root))
    if len(places) > 400:  # A vocabulary has thousands of nodes, so give other nodes more weight.
        places = chance.sample(places[:200], 100) + chance.sample(places, 100)
    holder, key, path = chance.choice(places)
    kind = chance.choice(("value", "value", "value", "gone", "renamed", "swapped"))
    if kind == "gone" and holder is not root:
        del holder[key]
    elif kind == "renamed" and isinstance(holder, dict):
        holder[chance.choice(("", "x", "\0", "a" * 5_000, "../x", f"{key} "))] = holder.pop(key)
    elif kind == "swapped":
        other, at, _ = chance.choice(places)
        if other is not root and holder is not root:
            text = json.dumps(other[at])  # Copy, because JSON cannot represent cycles.
            holder[key] = json.loads(text)
    else:
        kind = "value"
        holder[key] = chance.choice(VALUES)
    new = repr(holder[key])[:60] if kind == "value" else kind
    return root[0], f"{path[:150]}: {new}"


def _places(holder: Any, path: str = ""):
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for key, value in list(items):
        below = f"{path}/{key}"
        yield holder, key, below
        if isinstance(value, (dict, list)):
            yield from _places(value, below)
