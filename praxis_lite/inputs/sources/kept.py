"""Arrays and numbers kept on disk under one name: there whole or not at all, large ones mapped.

NAME.json has the numbers, and the length and the XXH3 digest of each NAME.<array>.npy. It is
written last, so where it is all else is. Another version of the library's formats is read as
nothing.
"""

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from praxis_lite.errors import ConfigError, not_written
from praxis_lite.inputs.processes.all_cores import require_guarded_main

_VERSION = 2
_SMALLEST_MAPPED = 1 << 20  # Bytes.


def write(folder: str, name: str, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Writes what JSON can hold, and arrays. Raises ConfigError if the disk does not take it."""
    place, digests = Path(folder), {}
    try:
        for key, array in arrays.items():
            partial = place / f".{os.getpid()}.{name}.{key}.npy"
            np.save(partial, array, allow_pickle=False)
            digests[key] = [partial.stat().st_size, _digest(partial)]
            os.replace(partial, place / f"{name}.{key}.npy")
        partial = place / f".{os.getpid()}.{name}.json"
        content = {"version": _VERSION, "values": values, "arrays": digests}
        partial.write_text(json.dumps(content))
        os.replace(partial, place / f"{name}.json")
    except OSError as error:
        raise not_written(place / name, error) from None


def read(folder: str, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Returns the values and the arrays, or None if they are not there whole."""
    place = Path(folder)
    try:
        content = json.loads((place / f"{name}.json").read_text())
        if content["version"] != _VERSION:
            return None
        arrays = {}
        for key, (size, _) in content["arrays"].items():
            path = place / f"{name}.{key}.npy"
            if path.stat().st_size != size:
                raise ValueError(f"{path} has {path.stat().st_size} bytes of {size}")
            # A process may map 65,530 files, so small ones are read.
            mode = "r" if size > _SMALLEST_MAPPED else None
            # A view that is no np.memmap: that class makes every slice slow.
            arrays[key] = np.asarray(np.load(path, mmap_mode=mode, allow_pickle=False))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s in %s cannot be read (%s); it is made again", name, folder, error)
        return None
    return content["values"], arrays


def digests(folder: str, name: str) -> dict[str, str]:
    """Returns the digest of each array, as it was when it was written."""
    content = json.loads((Path(folder) / f"{name}.json").read_text())
    return {key: digest for key, (_, digest) in content["arrays"].items()}


def is_damaged(folder: str, name: str) -> bool:
    """Returns True if an array no longer has the digest that it was written with; reads it all."""
    return any(
        _digest(Path(folder) / f"{name}.{key}.npy") != digest
        for key, digest in digests(folder, name).items()
    )


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Makes a folder, and keeps other processes from writing there meanwhile; says if it waits.

    Raises:
      ConfigError: the folder cannot be made or written; or this process imports a script that
        should not do anything then.
    """
    require_guarded_main()
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, "lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); what is derived of data is kept "
            "there. Set the source's cache_dir to a folder that can be written."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process, which prepares data in %s", folder)
            began = time.monotonic()
            fcntl.flock(file, fcntl.LOCK_EX)
            _log.info("waited %.1f s", time.monotonic() - began)
        yield


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


_log = logging.getLogger(__name__)
