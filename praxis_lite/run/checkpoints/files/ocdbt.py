"""The keys of an OCDBT database, and where their values lie: read in Python, nothing trusted.

TensorStore's own decoder believes what it reads: lengths of keys that add up to 17 GB, in a node
of 2 MB, or a table of 2^33 data files, in one of 131 kB, are allocated at once, and that ends the
process (tried with TensorStore 0.1.86). So it sees only what went through here before.

The format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format.
"""

import dataclasses
from pathlib import Path
from typing import Any

import tensorstore as ts

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.open_folder import OpenFolder, own_names
from praxis_lite.run.checkpoints.files.ocdbt_reader import (
    MAX_NAME_BYTES,
    MAX_NODE_BYTES,
    Reader,
)

DATABASE = "manifest.ocdbt"
_MAX_BYTES_OF_KEYS = 2**28
_MAX_HEIGHT = 16
_MAX_BYTES_OF_TREES = 10**8


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """Where a value lies: in the node itself, or in a part of a data file.

    Attributes:
      inline: the value, or None.
      path: of the data file, in the database's directory.
      offset, length: in bytes.
    """

    inline: bytes | None
    path: str
    offset: int
    length: int

    def read(self, directory: Path, most: int | None = None) -> bytes:
        """Returns the value, or its first `most` bytes."""
        length = self.length if most is None else min(most, self.length)
        if self.inline is not None:
            return self.inline[:length]
        return _read(directory / self.path, self.offset, length)


@dataclasses.dataclass(frozen=True)
class _Node:
    base_path: str
    path: str
    offset: int
    length: int
    height: int
    prefix: bytes


def stored_values(directory: Path) -> dict[str, StoredValue]:
    """Returns the values by key, in their order, of the newest version of a database.

    Args:
      directory: with `manifest.ocdbt`; there is no symlink in it.

    Raises:
      ConfigError: it is not what TensorStore writes for Orbax; says what.
    """
    files = (*directory.glob("d/*"), *directory.glob("ocdbt.process_*/d/*"))
    sizes = {str(path.relative_to(directory)): path.lstat().st_size for path in files}
    manifest = directory / DATABASE
    if not manifest.is_file() or manifest.stat().st_size > MAX_NODE_BYTES:
        raise ConfigError(f"{manifest} is not a manifest of OCDBT, the only layout that is read")
    nodes = _roots(manifest.read_bytes())
    seen: set[tuple[str, int]] = set()
    values: dict[str, StoredValue] = {}
    last = b""
    while nodes:
        node = nodes.pop()
        _check_range(node.path, node.offset, node.length, sizes)
        if node.length > MAX_NODE_BYTES:
            raise ConfigError(f"a node of {node.path} has {node.length} bytes")
        if (node.path, node.offset) in seen:  # Else a few nodes could stand for endless ones.
            raise ConfigError(f"two places of the tree name one node of {node.path}")
        seen.add((node.path, node.offset))
        result = _node(node, _read(directory / node.path, node.offset, node.length))
        if isinstance(result, list):
            nodes += reversed(result)
            continue
        for key, value in result.items():
            if values and key <= last:
                raise ConfigError("the keys of the tree are not in order")
            last = key
            if value.inline is None:
                _check_range(value.path, value.offset, value.length, sizes)
            values[_text(key)] = value
    _check_tensorstore_sees(directory, values)
    return values


def kvstore_spec(folder: Path, path: str, *, is_database: bool = True) -> dict[str, Any]:
    """Returns TensorStore's spec of a part of a database, or of a folder of files.

    Args:
      folder: a path that TensorStore takes, of `OpenFolder`.
    """
    files = {"driver": "file", "path": f"{folder}/"}
    if not is_database:
        return {**files, "path": files["path"] + path}
    return {"driver": "ocdbt", "base": files, "path": path, "cache_pool": "cache_pool#tree"}


def reading_context() -> ts.Context:
    """Returns the context that the arrays opened with it share: trees of databases, once read."""
    return ts.Context({
        "cache_pool": {"total_bytes_limit": 0},  # What is decoded is not kept.
        "cache_pool#tree": {"total_bytes_limit": _MAX_BYTES_OF_TREES},
    })


def _check_tensorstore_sees(directory: Path, values: dict[str, StoredValue]) -> None:
    """Checks that TensorStore sees the same keys, and finds its checksums right."""
    try:
        opened = OpenFolder(directory)
        spec = kvstore_spec(opened.path, "")
        keys = ts.KvStore.open(spec, context=reading_context()).result().list().result()
    except ValueError as error:
        raise ConfigError(f"{directory.name}: {own_names(str(error))}") from None
    if sorted(key.decode() for key in keys) != sorted(values):
        raise ConfigError(f"{directory.name}: TensorStore finds other keys in it")


def _check_range(path: str, offset: int, length: int, sizes: dict[str, int]) -> None:
    if path not in sizes:
        raise ConfigError(f"it names the data file {path!r}, which there is not")
    if offset + length > sizes[path]:
        raise ConfigError(
            f"it names bytes {offset} to {offset + length} of {path}, which has {sizes[path]}"
        )


def _roots(encoded: bytes) -> list[_Node]:
    """Returns the root of the newest version in a manifest, or [] if the database is empty."""
    reader = Reader(encoded, 0x0CDB3A2A, "manifest.ocdbt")
    reader.take(16)  # The database's id.
    if reader.byte() != 0:
        reader.fail("it has its versions in other files, as Orbax does not write them")
    reader.varints(2)  # Limits that concern writing.
    arity = reader.byte()
    if reader.varint() == 1:
        reader.take(4)  # A level of compression.
    files = reader.files("")
    num_versions = reader.varint()
    if not 1 <= num_versions <= 2 ** min(arity, 16):
        reader.fail(f"it has {num_versions} versions")
    reader.varints(num_versions)  # Generations.
    heights = reader.take(num_versions)
    references = reader.references(num_versions, files)
    reader.varints(3 * num_versions)  # Statistics.
    reader.take(8 * num_versions)  # Times.
    num_older = reader.varint()  # Nodes with older versions.
    reader.varints(num_older)
    reader.references(num_older, files)
    reader.varints(num_older)
    reader.take(9 * num_older)
    reader.end()
    if references[-1][1] == "":  # The newest version is empty.
        return []
    if heights[-1] > _MAX_HEIGHT:
        reader.fail(f"its tree is {heights[-1]} high")
    return [_Node(*references[-1], heights[-1], b"")]


def _node(node: _Node, encoded: bytes) -> list[_Node] | dict[bytes, StoredValue]:
    """Returns the children of a node, or the values of a leaf."""
    reader = Reader(encoded, 0x0CDB20DE, node.path)
    if reader.byte() != node.height:
        reader.fail("a node of another height than its parent says")
    files = reader.files(node.base_path)
    num_entries = reader.varint()
    if num_entries == 0:
        reader.fail("a node without entries")
    prefixes = [0, *reader.varints(num_entries - 1)]
    suffixes = reader.varints(num_entries)
    shared = reader.varints(num_entries) if node.height else [0] * num_entries
    keys, key, total = [], b"", 0
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        if prefix > len(key):
            reader.fail("a key that goes on from more than there is of the key before")
        key = key[:prefix] + reader.take(suffix)
        total += len(key)
        if len(node.prefix) + len(key) > MAX_NAME_BYTES or total > _MAX_BYTES_OF_KEYS:
            reader.fail("keys that are too long")
        keys.append(node.prefix + key)
    if node.height:
        references = reader.references(num_entries, files)
        reader.varints(3 * num_entries)  # Statistics.
        reader.end()
        children = []
        for reference, key, length in zip(references, keys, shared, strict=True):
            if len(node.prefix) + length > len(key):
                reader.fail("children whose keys share more than there is")
            prefix = key[: len(node.prefix) + length]
            children.append(_Node(*reference, node.height - 1, prefix))
        return children
    lengths, kinds = reader.varints(num_entries), reader.take(num_entries)
    if set(kinds) - {0, 1}:
        reader.fail("a value of no known kind")
    num_outside = sum(kinds)
    indices, offsets = reader.varints(num_outside), reader.varints(num_outside)
    outside = iter(zip(reader.named(indices, files), offsets, strict=True))
    values = {}
    for key, kind, length in zip(keys, kinds, lengths, strict=True):
        if kind:
            (_, path), offset = next(outside)
            values[key] = StoredValue(None, path, offset, length)
        else:
            values[key] = StoredValue(reader.take(length), node.path, 0, length)
    reader.end()
    return values


def _read(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"the key {key[:80]!r} is not text") from None
