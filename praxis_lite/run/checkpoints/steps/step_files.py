"""The files of a step: their digests, and errors in them."""

import errno
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.checkpoints.steps.manifest import (
    COMMIT_JSON,
    FORMAT,
    MANIFEST_JSON,
    commit_text,
    parse_manifest,
    read_small,
)

_CHUNK_BYTES = 1 << 20
_NUM_THREADS = 8


def foreign(step_dir: Path) -> str | None:
    """Returns why a step of another format is not read, or None if it has none that is known."""
    if (step_dir / "manifest" / "metadata").is_file():
        return f"has the format 1 of an earlier praxis_lite; this one reads {FORMAT}"
    return None


def verify(step_dir: Path) -> list[str]:
    """Returns the errors of a step, a line each, naming the file; [] if it is whole.

    Reads every file once, about as fast as the disk gives it.

    Raises:
      ConfigError: its manifest is whole, but of another format.
    """
    if step_dir.is_symlink():
        return ["it is a symbolic link"]
    if not step_dir.is_dir():
        return ["it is no directory"]
    if other := foreign(step_dir):
        return [f"it {other}"]
    try:
        result = dict(entries(step_dir))
        if not result:
            return ["it is an empty directory"]
        if COMMIT_JSON not in result:
            return [f"{COMMIT_JSON} is missing"]
        manifest, wrong = committed_manifest(step_dir)
        return wrong or _wrong_files(step_dir, result, manifest["files"])
    except OSError as error:  # Not of one file: those are told by name.
        return [f"it cannot be read ({error.strerror})"]


def committed_manifest(step_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns a step's manifest, and the errors in it or its commit; reads no other file.

    Raises:
      ConfigError: both are whole, but of another format.
    """
    texts = {}
    for name in (COMMIT_JSON, MANIFEST_JSON):
        try:
            texts[name] = read_small(step_dir / name)
        except FileNotFoundError:
            return {}, [f"{name} is missing"]
        except OSError as error:
            return {}, [f"{name} cannot be read ({error.strerror})"]
        except ValueError as error:
            return {}, [f"{name} {error}"]
    committed, text = texts[COMMIT_JSON], texts[MANIFEST_JSON]
    if xxhash.xxh3_128_hexdigest(text).encode() not in committed:
        return {}, [f"{COMMIT_JSON} has another digest than {MANIFEST_JSON}: one has changed"]
    try:
        manifest = parse_manifest(text)
    except ValueError as error:
        raise ConfigError(
            f"{step_dir / MANIFEST_JSON} {error}. Use the praxis_lite that wrote it."
        ) from None
    step = manifest["step"]
    if committed != commit_text(step, text).encode():
        return {}, [f"{COMMIT_JSON} has changed"]
    if str(step) != step_dir.name.partition(".")[0]:
        return {}, [f"{COMMIT_JSON} and {MANIFEST_JSON} are of step {step}"]
    return manifest, []


def synced_digests(step_dir: Path) -> dict[str, dict[str, Any]]:
    """Returns size and digest of each file below a folder, by its relative name.

    Everything, the folders too, is on disk when this returns.

    Raises:
      OSError: as the file system says it.
      ValueError: something below it is no regular file.
    """
    result = dict(entries(step_dir))
    for name, entry in result.items():
        if not entry.is_file(follow_symlinks=False):
            raise ValueError(f"{name} is no regular file")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(lambda name: _digest(step_dir / name, sync=True), result))
    for folder, _, _ in os.walk(step_dir, topdown=False):
        sync_directory(Path(folder))
    files = zip(result, digests, strict=True)
    return {name: {"size": size, "xxh3_128": digest} for name, (size, digest) in files}


def entries(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry]]:
    """Yields all but folders below a folder, by relative name; follows no link.

    Raises:
      OSError: a folder cannot be read, or lies deeper than item/ocdbt.process_0/d.
    """
    with os.scandir(folder) as result:
        for entry in sorted(result, key=lambda entry: entry.name):
            name = prefix + entry.name
            if not entry.is_dir(follow_symlinks=False):
                yield name, entry
            elif name.count("/") > 3:
                raise OSError(errno.ENAMETOOLONG, f"its folder {name} is too deep")
            else:
                yield from entries(Path(entry.path), f"{name}/")


def sync_directory(path: Path) -> None:
    """Makes sure that the names in a directory are on disk."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _wrong_files(
    step_dir: Path, actual: Mapping[str, os.DirEntry], files: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    def wrong_at_once(name: str) -> str | None:
        if name not in actual:
            return "is missing"
        if name not in files:
            return "is not one of its files"
        if not actual[name].is_file(follow_symlinks=False):
            return "is no regular file"
        size = actual[name].stat(follow_symlinks=False).st_size
        expected = files[name]["size"]
        return None if size == expected else f"has {size} bytes, not {expected}"

    def changed(name: str) -> str | None:
        try:
            digest = _digest(step_dir / name)[1]
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        same = digest == files[name]["xxh3_128"]
        return None if same else "has changed: its digest is another"

    names = sorted(files.keys() | actual.keys() - {COMMIT_JSON, MANIFEST_JSON})
    wrong = {name: why for name in names if (why := wrong_at_once(name))}
    # Largest first, so that no thread is left with a large one at the end.
    whole = sorted((n for n in names if n not in wrong), key=lambda name: -files[name]["size"])
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        later = dict(sorted(zip(whole, pool.map(changed, whole), strict=True)))
    return [f"{_shown(name)} {why}" for name, why in {**wrong, **later}.items() if why]


def _shown(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def _digest(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Returns a file's size and digest; its bytes pass through a small buffer."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return size, digest.hexdigest()
