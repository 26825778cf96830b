"""A cache on disk for arrays and values that are computed from data."""

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import filelock
import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.whole_files import not_written
from praxis_lite.inputs.processes.all_cores import require_guarded_main

_VALUES = "values.json"
_SMALL = 1 << 20  # Bytes. Larger arrays are mapped; a process may map 65,530 files, so not all are.
Made = tuple[dict[str, Any], dict[str, np.ndarray]]


class Entry(NamedTuple):
    """What is stored under a name.

    Attributes:
      values: JSON.
      arrays: by name; large ones are memory-mapped.
      digests: XXH3 of the bytes of each array when it was written, in hex.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    digests: dict[str, str]


def entries(
    folder: str, names: Sequence[str], make: Callable[[list[int]], None]
) -> list[Entry]:
    """Returns the entry of each name, read from a folder, or made now.

    Args:
      make: calls `write` for the entries of these numbers; no other process does so meanwhile.

    Raises:
      ConfigError: the folder cannot be written, or an entry cannot be read.
    """
    result = [read(folder, name) for name in names]
    if None in result:
        with locked(folder):
            # Another process may have made some by now.
            result = [
                entry or read(folder, name) for entry, name in zip(result, names, strict=True)
            ]
            missing = [number for number, entry in enumerate(result) if entry is None]
            if missing:
                make(missing)
            for number in missing:
                result[number] = read(folder, names[number])
    return result


def read(folder: str, name: str) -> Entry | None:
    """Returns an entry, or None if there is none. Raises ConfigError if it is damaged."""
    place = os.path.join(folder, name)
    if not os.path.exists(place):
        return None
    try:
        with open(os.path.join(place, _VALUES)) as file:
            content = json.load(file)
        arrays = {key: _array(os.path.join(place, f"{key}.npy")) for key in content["digests"]}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{place}, which is derived from data, cannot be read ({error}). Delete it and launch "
            "again; it is then recomputed."
        ) from None
    return Entry(content["values"], arrays, content["digests"])


def _array(path: str) -> np.ndarray:
    is_large = os.path.getsize(path) > _SMALL
    # No np.memmap: that class makes every slice slow.
    return np.asarray(np.load(path, mmap_mode="r" if is_large else None, allow_pickle=False))


def write(
    folder: str, name: str, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Writes an entry atomically. Raises ConfigError if it cannot be written."""
    place = os.path.join(folder, name)
    partial = os.path.join(folder, f".{secrets.token_hex(8)}.partial")
    digests = {
        key: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(x)) for key, x in arrays.items()
    }
    try:
        os.makedirs(partial)
        for key, array in arrays.items():
            np.save(os.path.join(partial, f"{key}.npy"), array, allow_pickle=False)
        with open(os.path.join(partial, _VALUES), "w") as file:
            json.dump({"values": values, "digests": digests}, file)
        os.rename(partial, place)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise not_written(place, error) from None


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Creates a folder and locks it against writes of other processes; logs if it has to wait.

    Raises:
      ConfigError: the folder cannot be made or written; or this process imports a script that
        should not do anything then.
    """
    require_guarded_main()
    try:
        os.makedirs(folder, exist_ok=True)
        lock = filelock.FileLock(os.path.join(folder, "lock"), mode=0o666)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            _log.info("waiting for another process, which prepares data in %s", folder)
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}); what is derived from data is "
            "stored there. Set the source's cache_dir to a folder that can be written."
        ) from None
    try:
        yield
    finally:
        lock.release()


_log = logging.getLogger(__name__)
