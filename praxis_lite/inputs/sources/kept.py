"""Cache of derived data on disk: verified entries by name, or made again.

An entry NAME is NAME.json, with values and the length and XXH3 digest of each of its files:
NAME.KEY.npy of an array, NAME.KEY of any other. NAME.json ends all writing, and has a digest of its
own text. A file is compared with its digest before it is used.
"""

import contextlib
import fcntl
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, few
from praxis_lite.files.whole_files import not_written
from praxis_lite.inputs.processes import compared
from praxis_lite.inputs.processes.all_cores import require_guarded_main
from praxis_lite.inputs.sources.files.plain import (
    created,
    digest_of,
    opened,
    partial_path,
    partial_paths,
    replace,
)

_VERSION = 3
_LARGEST_JSON = 1 << 26  # Bytes.
_LONGEST_NAME = 160  # Bytes, of the 255 that file systems take.
_WORTH_A_LINE = 5.0  # Seconds.
_THREADS = 4  # A disk gives more to several readers.


class Kept(NamedTuple):
    """An entry that is as it was written.

    Attributes:
      values: of JSON.
      arrays: by name; large ones are mapped.
      files: paths, by the ends of their names.
      digests: of the arrays and files.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    files: dict[str, str]
    digests: dict[str, str]


def entries(
    folder: str, names: Sequence[str], make: Callable[[list[int]], None],
    is_current: Callable[[int, Kept], bool] = lambda number, result: True,
) -> list[Kept]:
    """Returns the entry of each name, read from a folder, or made now.

    Args:
      make: writes the entries of these numbers; no other process writes there meanwhile.
      is_current: of the number of an entry and of what is kept, if that is still right.

    Raises:
      ConfigError: the folder cannot be written, or does not keep what is written there.
    """

    def current(number: int, reasons: list[str] | None = None) -> Kept | None:
        actual = read(folder, names[number], reasons)
        return actual if actual is not None and is_current(number, actual) else None

    began = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        result = list(pool.map(lambda number: current(number, []), range(len(names))))
    if (seconds := time.monotonic() - began) > _WORTH_A_LINE:
        _log.info("compared what %s has with its digests, in %.0f s", folder, seconds)
    if None not in result:
        return result
    with locked(folder):
        # Another process may have made some by now.
        reasons: list[str] = []
        result = [element or current(number, reasons) for number, element in enumerate(result)]
        for reason in few(reasons, separator="\n").splitlines():
            _log.warning("%s", reason)
        missing = [number for number, one in enumerate(result) if one is None]
        if missing:
            make(missing)
        result = [one or current(number) for number, one in enumerate(result)]
    for name, item in zip(names, result, strict=True):
        if item is None:
            raise ConfigError(
                f"{folder} does not have {name} as it was just written there. Look after the disk, "
                "or set the source's cache_dir to a folder on another."
            )
    return result


def read(folder: str, name: str, reasons: list[str] | None = None) -> Kept | None:
    """Returns an entry, or None if it is not there as it was written.

    Args:
      reasons: gets a line on what is wrong with an entry that is there. None: the line is logged.
    """
    try:
        return _read(Path(folder), name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if os.path.lexists(Path(folder, f"{_stem(name)}.json")):
            line = f"{name} in {folder} cannot be used ({error}); it is made again"
            if reasons is None:
                _log.warning("%s", line)
            else:
                reasons.append(line)
        return None


def _read(place: Path, name: str) -> Kept:
    with opened(place / f"{_stem(name)}.json") as file:
        text = file.read(_LARGEST_JSON)
    content = json.loads(text[_BODY:-1]) if text == _with_digest(text[_BODY:-1]) else {}
    if content.get("version") != _VERSION or content["name"] != name:
        raise ValueError("its .json is damaged, of another entry, or of an earlier version")
    arrays, files, digests = {}, {}, {}
    for key, (size, digest) in content["files"].items():
        path = place / f"{_stem(name)}.{key}"
        with opened(path) as file:
            result = os.fstat(file.fileno())
            if result.st_size != size:
                raise ValueError(f"{path.name} has {result.st_size:,} bytes of {size:,}")
            # A process may map 65,530 files, so small ones are read.
            data = file.read() if size <= compared.SMALLEST else None
            _compare(path, file, data, result, digest)
            if key.endswith(".npy"):
                key = key.removesuffix(".npy")
                arrays[key] = _array(file if data is None else io.BytesIO(data), data is None)
            else:
                files[key] = str(path)
        digests[key] = digest
    return Kept(content["values"], arrays, files, digests)


def _compare(
    path: Path, file: IO[bytes], data: bytes | None, result: os.stat_result, digest: str
) -> None:
    if compared.is_compared(str(path), result, digest):
        return
    if (digest_of(file) if data is None else xxhash.xxh3_128_hexdigest(data)) != digest:
        raise ValueError(f"the bytes of {path.name} are not those that were written")
    compared.add(str(path), result, digest)


def _array(file: IO[bytes], is_mapped: bool) -> np.ndarray:
    file.seek(0)
    if not is_mapped:
        return np.load(file, allow_pickle=False)
    # Mapped by the file that was compared, not by its name.
    np.lib.format.read_magic(file)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    mapped = np.memmap(file, dtype, "r", file.tell(), shape, order="F" if is_fortran else "C")
    return np.asarray(mapped)  # No np.memmap: that class makes every slice slow.


def write(
    folder: str, name: str, values: Mapping[str, Any], arrays: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
) -> None:
    """Writes an entry: what JSON can hold, arrays, and files that are moved there.

    Args:
      files: paths from `partial_path`, by the ends of their names.

    Raises:
      ConfigError: the disk does not take it.
    """
    place, stem, written = Path(folder), _stem(name), {}
    moved = {f"{key}.npy": partial_path(folder) for key in arrays} | dict(files or {})
    try:
        for key, array in arrays.items():
            with created(moved[f"{key}.npy"]) as file:
                np.save(file, array, allow_pickle=False)
        for key, partial in moved.items():
            with opened(partial) as file:
                written[key] = [os.fstat(file.fileno()).st_size, digest_of(file)]
            os.replace(partial, place / f"{stem}.{key}")
        content = {"version": _VERSION, "name": name, "values": values, "files": written}
        replace(place / f"{stem}.json", _with_digest(json.dumps(content).encode()))
    except IsADirectoryError as error:
        raise ConfigError(
            f"{error.filename2 or error.filename} is a directory, where a file is to be kept that "
            "is derived of data. Remove it, and launch again."
        ) from None
    except OSError as error:
        raise not_written(place / name, error) from None
    finally:
        for partial in moved.values():
            with contextlib.suppress(OSError):
                os.unlink(partial)


def write_note(folder: str, name: str, text: str) -> None:
    """Writes a file for people, which nothing reads. Raises ConfigError if the disk refuses it."""
    try:
        replace(Path(folder, name), text.encode())
    except OSError as error:
        raise not_written(Path(folder, name), error) from None


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Makes a folder, and keeps other processes from writing there meanwhile; says if it waits.

    Raises:
      ConfigError: the folder cannot be made or written; or this process imports a script that
        should not do anything then.
    """
    require_guarded_main()
    path = os.path.join(folder, "lock")
    try:
        os.makedirs(folder, exist_ok=True)
        # Neither a pipe, which has no reader, nor a link to a file elsewhere.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(path, flags, 0o666)
    except OSError as error:
        at = path if os.path.lexists(path) else folder
        raise ConfigError(
            f"{at} cannot be written ({error.strerror}); what is derived of data is kept "
            "there. Set the source's cache_dir to a folder that can be written."
        ) from None
    with os.fdopen(lock, "wb"):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process, which prepares data in %s", folder)
            began = time.monotonic()
            fcntl.flock(lock, fcntl.LOCK_EX)
            _log.info("waited %.1f s", time.monotonic() - began)
        for left in partial_paths(folder):  # By processes that were killed.
            with contextlib.suppress(OSError):
                left.unlink()
        yield


def _with_digest(body: bytes) -> bytes:
    """Returns the text of NAME.json."""
    return b'{"xxh3": "%s", "kept": %s}' % (xxhash.xxh3_128_hexdigest(body).encode(), body)


_BODY = len(_with_digest(b"")) - 1


def _stem(name: str) -> str:
    """Returns the stem of an entry's files: its name; a long name is cut and ends in its hash."""
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_NAME:
        return name
    return f"{os.fsdecode(encoded[:_LONGEST_NAME])}.{xxhash.xxh3_64_hexdigest(encoded)}"


_log = logging.getLogger(__name__)
