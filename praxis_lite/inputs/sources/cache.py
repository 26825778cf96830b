"""A disk cache for arrays and JSON values that are computed from data."""

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
from praxis_lite.host.atomic_files import not_written
from praxis_lite.inputs.processes.all_cores import require_guarded_main

_VALUES = "values.json"
# Larger arrays are memory-mapped. Smaller arrays are read, because Linux limits a process to 65,530
# mappings.
_MAX_BYTES_READ = 1 << 20
Contents = tuple[dict[str, Any], dict[str, np.ndarray]]  # (JSON values, arrays) of an entry.


class Entry(NamedTuple):
    """A cache entry.

    Attributes:
      values: JSON values.
      arrays: Arrays, keyed by name; large arrays are memory-mapped.
      digests: Hex XXH3 of each array's bytes when the array was written.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    digests: dict[str, str]


def entries(folder: str, names: Sequence[str], make: Callable[[list[int]], None]) -> list[Entry]:
    """Reads the named entries from a folder, after computing missing entries.

    Args:
      folder: Cache folder.
      names: Names of the entries.
      make: Function that computes and writes the entries at the given indices of `names`. The
        folder is locked during the call.

    Raises:
      ConfigError: The folder cannot be written, or an entry cannot be read.
    """
    found = [read(folder, name) for name in names]
    if None in found:
        with locked(folder):
            # Look again: another process may have written entries before this process acquired the
            # lock.
            found = [entry or read(folder, name) for entry, name in zip(found, names, strict=True)]
            missing = [index for index, entry in enumerate(found) if entry is None]
            if missing:
                make(missing)
            for index in missing:
                found[index] = read(folder, names[index])
    complete = [entry for entry in found if entry is not None]
    assert len(complete) == len(names), "`make` did not write all missing entries"
    return complete


def read(folder: str, name: str) -> Entry | None:
    """Returns an entry, or None if it does not exist. Raises ConfigError if it is damaged."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return None
    try:
        with open(os.path.join(path, _VALUES)) as file:
            content = json.load(file)
        arrays = {key: _read_array(os.path.join(path, f"{key}.npy")) for key in content["digests"]}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The cached data in {path} cannot be read ({error}). Delete it and launch again "
            "to recompute it."
        ) from None
    return Entry(content["values"], arrays, content["digests"])


def _read_array(path: str) -> np.ndarray:
    is_large = os.path.getsize(path) > _MAX_BYTES_READ
    # Convert the np.memmap to a plain array on the same memory, whose slices are faster.
    return np.asarray(np.load(path, mmap_mode="r" if is_large else None, allow_pickle=False))


def write(
    folder: str, name: str, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Writes an entry atomically. Raises ConfigError if it cannot be written."""
    path = os.path.join(folder, name)
    partial = os.path.join(folder, f".{secrets.token_hex(8)}.partial")
    digests = {
        key: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(x).data) for key, x in arrays.items()
    }
    try:
        os.makedirs(partial)
        for key, array in arrays.items():
            np.save(os.path.join(partial, f"{key}.npy"), array, allow_pickle=False)
        with open(os.path.join(partial, _VALUES), "w") as file:
            json.dump({"values": values, "digests": digests}, file)
        os.rename(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise not_written(path, error) from None


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Creates a folder and holds its lock; logs a message if another process holds the lock.

    Raises:
      ConfigError: The folder cannot be created or written, or the user's script lacks an
        `if __name__ == "__main__"` guard.
    """
    require_guarded_main()
    try:
        os.makedirs(folder, exist_ok=True)
        lock = filelock.FileLock(os.path.join(folder, "lock"), mode=0o666)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            _log.info("waiting for another process to prepare data in %s", folder)
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"The cache folder {folder} cannot be written ({error.strerror or error}). Set the "
            "source's cache_dir to a writable folder."
        ) from None
    try:
        yield
    finally:
        lock.release()


_log = logging.getLogger(__name__)
