"""The files of a step: their digests, and errors in them."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from praxis_lite.checkpoints.steps.manifest import (
    COMMIT_JSON,
    MANIFEST_JSON,
    commit_text,
    parse_manifest,
)
from praxis_lite.core.errors import ConfigError

__all__ = ("committed_manifest",)

_CHUNK_BYTES = 1 << 20
_NUM_THREADS = 8


def verify(step_dir: Path) -> list[str]:
    """Returns the errors of a step, a line each, naming the file; [] if it is complete.

    Reads every file once, about as fast as the disk gives it.

    Raises:
      ConfigError: its manifest is undamaged, but has another format.
    """
    try:
        actual = _files(step_dir)
        if not actual:
            return ["it is an empty directory"]
        manifest, wrong = committed_manifest(step_dir)
        return wrong or _wrong_files(actual, manifest["files"])
    except OSError as error:  # Errors of a single file are reported by its name.
        return [f"it cannot be read ({error.strerror})"]


def committed_manifest(step_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns a step's manifest, and the errors in it or its commit; reads no other file.

    Raises:
      ConfigError: both are undamaged, but have another format.
    """
    texts = {}
    for name in (COMMIT_JSON, MANIFEST_JSON):
        try:
            texts[name] = (step_dir / name).read_bytes()
        except FileNotFoundError:
            return {}, [f"{name} is missing"]
        except OSError as error:
            return {}, [f"{name} cannot be read ({error.strerror})"]
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
    """
    paths = _files(step_dir)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(lambda path: _digest(path, sync=True), paths.values()))
    for folder, _, _ in os.walk(step_dir, topdown=False):
        sync_directory(Path(folder))
    files = zip(paths, digests, strict=True)
    return {name: {"size": size, "xxh3_128": digest} for name, (size, digest) in files}


def _files(folder: Path) -> dict[str, Path]:
    """Returns everything but folders below a folder, by relative name."""
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*")) if not path.is_dir()
    }


def sync_directory(path: Path) -> None:
    """Makes sure that the names in a directory are on disk."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _wrong_files(
    actual: Mapping[str, Path], files: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    def wrong_at_once(name: str) -> str | None:
        if name not in actual:
            return "is missing"
        if name not in files:
            return "is not one of its files"
        size = actual[name].stat().st_size
        expected = files[name]["size"]
        return None if size == expected else f"has {size} bytes, not {expected}"

    def changed(name: str) -> str | None:
        try:
            digest = _digest(actual[name])[1]
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
    return [f"{name} {why}" for name, why in {**wrong, **later}.items() if why]


def _digest(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Returns a file's size and digest; its bytes pass through a small buffer."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return size, digest.hexdigest()
