"""What Orbax puts beside the arrays: which files there are, and that its JSON says nothing else.

Of these files a restore trusts `_METADATA` (the tree; which format; types to restore as; a second
tree with names of modules, where there is one), `_sharding` (read along, not used where shardings
are given) and `array_metadatas` (a kind of random key to make of an array). So each has to say
what the manifest says, and no more; keys that Orbax might read and praxis_lite does not write are
refused.
"""

import base64
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.files.untrusted_json import is_shape, loads, read_object, same
from praxis_lite.checkpoints.steps.step_files import entries
from praxis_lite.errors import ConfigError

ITEMS = ("mdl_vars", "opt_states")
_DATABASE = r"(manifest\.ocdbt|d/[0-9a-f]{32})"
_NAME = re.compile(
    r"(manifest\.json|commit\.json|_CHECKPOINT_METADATA|commit_success\.txt|(mdl_vars|opt_states)/"
    rf"(_METADATA|_sharding|commit_success\.txt|array_metadatas/process_\d{{1,9}}|{_DATABASE}"
    rf"|ocdbt\.process_\d{{1,9}}/{_DATABASE}))"
)
# What tells other layouts, by a file's own name.
_FOREIGN = {
    ".zarray": "plain Zarr files", ".zgroup": "plain Zarr files", "zarr.json": "Zarr 3 files",
    "checkpoint": "Flax's or T5X's msgpack", "_METADATA.json": "another Orbax",
    "metadata": "Pax, or an earlier praxis_lite",
}
_EMPTY = {"Dict", "List", "Tuple", "NamedTuple", "None"}
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def check_names(step_dir: Path) -> None:
    """Checks that a step's folder has what praxis_lite and Orbax write, and nothing else.

    Raises:
      ConfigError: there is a symlink or another special file, at any depth; or a name that neither
        writes: those of other layouts are told.
    """
    for name in regular_files(step_dir):
        if not _NAME.fullmatch(name):
            base, suffix = os.path.basename(name), os.path.splitext(name)[1]
            layout = _FOREIGN.get(base) or {".npz": "NumPy", ".npy": "NumPy"}.get(suffix)
            of = f", of another layout ({layout})" if layout else ""
            raise ConfigError(f"there is a file {name!r} that praxis_lite does not write{of}")


def regular_files(directory: Path) -> Iterator[str]:
    """Yields the names of the files at any depth, with their folders.

    Raises:
      ConfigError: there is a symlink or another special file.
    """
    if directory.is_symlink():
        raise ConfigError("it is a symbolic link")
    for name, entry in entries(directory):
        if entry.is_symlink():
            raise ConfigError(f"{name!r} is a symbolic link")
        if not entry.is_file(follow_symlinks=False):
            raise ConfigError(f"{name!r} is no regular file")
        yield name


def check_checkpoint_metadata(step_dir: Path) -> None:
    """Checks what Orbax says of the whole step."""
    name = "_CHECKPOINT_METADATA"
    found = read_object(step_dir, name)
    handlers = found.get("item_handlers")
    if handlers not in (None, {item: _HANDLER for item in ITEMS}) or found.get("custom_metadata"):
        raise ConfigError(f"{name} is not as praxis_lite writes it")


def stored_names(step_dir: Path, item: str, leaves: Mapping[str, Mapping[str, Any]]) -> dict:
    """Returns the name in the database of each leaf, by its path in the manifest.

    Args:
      leaves: of this item, by path, as the manifest has them.

    Raises:
      ConfigError: Orbax's files have other leaves than the manifest, or two of one name, or ask
        for what praxis_lite does not write.
    """
    metadata = read_object(step_dir, f"{item}/_METADATA")
    tree = metadata.pop("tree_metadata", None)
    wanted = {
        "use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    if not isinstance(tree, dict) or not same(metadata, wanted):
        raise ConfigError(f"{item}/_METADATA has other settings than praxis_lite writes")
    names: dict[str, str] = {}
    keys_seen: set[tuple[str, ...]] = set()
    for entry in tree.values():
        keys, is_empty = _tree_entry(entry, item, leaves, len(tree))
        if keys in keys_seen:
            raise ConfigError(f"{item}/_METADATA has {'/'.join(keys)!r} twice")
        keys_seen.add(keys)
        if not is_empty:
            names["/".join((item, *keys))] = ".".join(keys)
    if names.keys() != leaves.keys():
        other = min(names.keys() ^ leaves.keys())
        where = "_METADATA" if other in names else "manifest.json"
        raise ConfigError(f"the array {other!r} is only in {where}")
    if len(set(names.values())) < len(names):
        raise ConfigError("two arrays have one name where they are stored")
    for keys in keys_seen:
        if any(keys[:length] in keys_seen for length in range(1, len(keys))):
            raise ConfigError(f"{'/'.join(keys)!r} lies below an array")
    _check_sharding(step_dir, item, set(names.values()))
    for name in sorted(os.listdir(step_dir / item / "array_metadatas")):
        _check_array_metadatas(step_dir, f"{item}/array_metadatas/{name}", set(names.values()))
    return names


def _tree_entry(
    entry: Any, item: str, leaves: Mapping[str, Mapping[str, Any]], most: int
) -> tuple[tuple[str, ...], bool]:
    """Returns the keys that lead to an entry of the tree, and whether it is an empty container."""
    where = f"{item}/_METADATA"
    if not isinstance(entry, dict) or entry.keys() != {"key_metadata", "value_metadata"}:
        raise ConfigError(f"{where} has an entry that praxis_lite does not write")
    keys, value = entry["key_metadata"], entry["value_metadata"]
    if not isinstance(keys, list) or not keys or not isinstance(value, dict):
        raise ConfigError(f"{where} has an entry that praxis_lite does not write")
    for one in keys:
        is_key = isinstance(one, dict) and one.keys() == {"key", "key_type"}
        if not is_key or not isinstance(one["key"], str) or one["key_type"] not in (1, 2):
            raise ConfigError(f"{where} has a key that praxis_lite does not write")
        # An index beyond the entries would make a list as long as it says.
        is_index = one["key"].isascii() and one["key"].isdigit() and int(one["key"][:9]) <= most
        if one["key_type"] == 1 and not (is_index and len(one["key"]) < 9):
            raise ConfigError(f"{where} has the index {one['key'][:20]!r}")
    path = tuple(one["key"] for one in keys)
    if any(part in ("", ".", "..") for key in path for part in key.split("/")):
        raise ConfigError(f"{where} has the key {'/'.join(path)[:80]!r}")
    leaf = leaves.get("/".join((item, *path)))
    shape = value.pop("write_shape", None)
    if leaf is None:
        kind, skip = value.get("value_type"), value.get("skip_deserialize")
        if kind in _EMPTY and skip is True and len(value) == 2 and shape is None:
            return path, True
    elif (
        same(value, {"value_type": "jax.Array", "skip_deserialize": False})
        and is_shape(shape) and len(shape) == len(leaf["shape"])
    ):
        return path, False
    what = "is not as praxis_lite writes it" if leaf else "is not in manifest.json"
    raise ConfigError(f"{where} has an array {'/'.join(path)[:80]!r} that {what}")


def _check_sharding(step_dir: Path, item: str, names: set[str]) -> None:
    """Checks `_sharding`: of each array a sharding, as JSON in a string."""
    where, seen = f"{item}/_sharding", set()
    for key, text in read_object(step_dir, where).items():
        try:
            name = base64.b64decode(key, validate=True).decode()
        except ValueError:
            name = None
        if name not in names or not isinstance(text, str):
            raise ConfigError(f"{where} has an array that is not in manifest.json")
        if text not in seen and not _is_sharding(loads(text.encode(), where)):
            raise ConfigError(f"{where} has a sharding that praxis_lite does not write")
        seen.add(text)


def _is_sharding(found: Any) -> bool:
    if isinstance(found, dict) and found.get("sharding_type") == "SingleDeviceSharding":
        return found.keys() == {"sharding_type", "device_str"} and isinstance(
            found["device_str"], str
        )
    types = {
        "sharding_type": str, "shape": list, "axis_names": list, "axis_types": list,
        "partition_spec": list, "device_mesh": dict,
    }
    if not isinstance(found, dict) or found.keys() != types.keys():
        return False
    if not all(isinstance(found[key], kind) for key, kind in types.items()):
        return False
    dims = (found["axis_names"], found["axis_types"])
    spec = [name for entry in found["partition_spec"] for name in _names_of(entry)]
    return (
        found["sharding_type"] == "NamedSharding" and is_shape(found["shape"])
        and all(isinstance(name, str) for names in dims for name in names)
        and set(spec) <= set(found["axis_names"])
        and found["device_mesh"].keys() == {"mesh"} and _is_mesh(found["device_mesh"]["mesh"])
    )


def _names_of(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else [] if entry is None else [entry]


def _is_mesh(found: Any) -> bool:
    if isinstance(found, list):
        return all(map(_is_mesh, found))
    return isinstance(found, dict) and found.keys() == {"id"} and type(found["id"]) is int


def _check_array_metadatas(step_dir: Path, name: str, names: set[str]) -> None:
    found = read_object(step_dir, name)
    entries = found.get("array_metadatas")
    if found.keys() != {"array_metadatas"} or not isinstance(entries, list):
        raise ConfigError(f"{name} is not as Orbax writes it")
    for entry in entries:
        one = entry.get("array_metadata") if isinstance(entry, dict) else None
        if not isinstance(one, dict) or set(one) != {
            "param_name", "write_shape", "chunk_shape", "ext_metadata"
        }:
            raise ConfigError(f"{name} is not as Orbax writes it")
        shapes = one["write_shape"], one["chunk_shape"]
        # ext_metadata would make random keys of an array.
        if one["param_name"] not in names or not all(map(is_shape, shapes)) or one["ext_metadata"]:
            raise ConfigError(f"{name} has an array that praxis_lite does not write")
