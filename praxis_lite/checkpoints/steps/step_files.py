"""Computes digests of a step's files, and verifies the files with them."""

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
from praxis_lite.host.object_stores import StorePath

__all__ = ("committed_manifest",)

_CHUNK_BYTES = 1 << 20
_NUM_THREADS = 8


def verify(step_dir: Path | StorePath) -> list[str]:
    """Verifies a step by reading every file once.

    In an object store, only the sizes and versions of the files are compared. The store verifies
    their content, and each process downloads only the bytes that its devices need.

    Returns:
      A line with the file's name for each error, or [] if the step is undamaged.

    Raises:
      ConfigError: The manifest is undamaged, but has a different format version.
    """
    try:
        if isinstance(step_dir, StorePath):
            manifest, errors = committed_manifest(step_dir)
            return errors or _object_errors(step_dir, manifest["files"])
        actual = _files(step_dir)
        if not actual:
            return ["it is an empty directory"]
        manifest, errors = committed_manifest(step_dir)
        return errors or _file_errors(actual, manifest["files"])
    except OSError as error:
        return [f"it cannot be read ({error.strerror})"]


def committed_manifest(step_dir: Path | StorePath) -> tuple[dict[str, Any], list[str]]:
    """Returns a step's manifest, and a list of errors in the manifest and the commit.

    Raises:
      ConfigError: Both files are undamaged, but have a different format version.
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
    # Check the digest before parsing, so that damage is not reported as a different format.
    if xxhash.xxh3_128_hexdigest(text).encode() not in committed:
        return {}, [f"the digest of {MANIFEST_JSON} differs from {COMMIT_JSON}: one has changed"]
    try:
        manifest = parse_manifest(text)
    except ValueError as error:
        raise ConfigError(
            f"{step_dir / MANIFEST_JSON} {error}. Use the praxis_lite version that wrote it."
        ) from None
    step = manifest["step"]
    if committed != commit_text(step, text).encode():
        return {}, [f"{COMMIT_JSON} has changed"]
    # Steps that are set aside have a suffix, as in "300.damaged".
    if str(step) != step_dir.name.partition(".")[0]:
        return {}, [f"{COMMIT_JSON} and {MANIFEST_JSON} belong to step {step}"]
    return manifest, []


def synced_digests(step_dir: Path | StorePath) -> dict[str, dict[str, Any]]:
    """Syncs all files and folders below a folder to disk, and computes digests of the files.

    Returns:
      The size and digest of each file, keyed by relative path. In an object store, the URL and the
      version's tag replace the digest.
    """
    if isinstance(step_dir, StorePath):
        return {
            name: {"size": status.st_size, "tag": status.tag, "url": str(step_dir / name)}
            for name, status in step_dir.newest_files().items()
        }
    paths = _files(step_dir)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(lambda path: _digest(path, sync=True), paths.values()))
    for folder, _, _ in os.walk(step_dir, topdown=False):
        sync_directory(Path(folder))
    files = zip(paths, digests, strict=True)
    return {name: {"size": size, "xxh3_128": digest} for name, (size, digest) in files}


def _files(folder: Path) -> dict[str, Path]:
    """Returns all files below a folder, keyed by relative path."""
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def sync_directory(path: Path) -> None:
    """Syncs the entries of a directory to disk."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _file_errors(actual: Mapping[str, Path], files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Compares files with their entries in the manifest, and returns a line for each error."""

    def name_or_size_error(name: str) -> str | None:
        if name not in actual:
            return "is missing"
        if name not in files:
            return "is not one of its files"
        size = actual[name].stat().st_size
        expected = files[name]["size"]
        return None if size == expected else f"has {size} bytes, not {expected}"

    def digest_error(name: str) -> str | None:
        try:
            digest = _digest(actual[name])[1]
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        # A step that was copied from an object store has no digests.
        is_same = digest == files[name].get("xxh3_128", digest)
        return None if is_same else "has changed: its digest differs from the manifest"

    names = sorted(files.keys() | actual.keys() - {COMMIT_JSON, MANIFEST_JSON})
    errors = {name: error for name in names if (error := name_or_size_error(name))}
    # Start with the largest files, so that the threads finish at about the same time.
    others = sorted((n for n in names if n not in errors), key=lambda name: -files[name]["size"])
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digest_errors = dict(sorted(zip(others, pool.map(digest_error, others), strict=True)))
    return [f"{name} {error}" for name, error in {**errors, **digest_errors}.items() if error]


def _object_errors(step_dir: StorePath, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Compares objects with their entries in the manifest, and returns a line for each error."""

    def error(name: str) -> str | None:
        try:
            status = (step_dir / name).stat()
        except FileNotFoundError:
            return f"{name} is missing"
        expected = files[name]
        if status.st_size != expected["size"]:
            return f"{name} has {status.st_size} bytes, not {expected['size']}"
        # A copy of a step has the same content, but may have different versions.
        if expected.get("url") == str(step_dir / name) and status.tag != expected["tag"]:
            return f"{name} has changed: its version differs from the manifest"
        return None

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return [line for line in pool.map(error, sorted(files)) if line]


def _digest(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Returns a file's size and digest, read through a small buffer."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return size, digest.hexdigest()
