"""The folders of a directory's steps: their names, commits, verification and deletion.

`steps_in` returns `DiskSteps` or `StoredSteps`, which have the same methods. This file imports
neither Orbax nor JAX, so that command-line tools start quickly.
"""

import abc
import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from praxis_lite.checkpoints.steps.manifest import (
    COMMIT_JSON,
    MANIFEST_JSON,
    commit_text,
    committed_manifest,
)
from praxis_lite.host.atomic_files import sync
from praxis_lite.host.object_stores import AnyPath, ObjectStatus, StorePath

__all__ = ("StepStore", "steps_in")

# Kinds of folders that a killed save or deletion leaves behind.
LEFTOVERS = ("saving", "deleting")

# Names of files in object stores.
_STEPS_JSON, _DAMAGED_JSON = "steps.json", "commit.damaged.json"

_STEP = re.compile(r"0|[1-9][0-9]*")
_CHUNK_BYTES = 1 << 20
_NUM_THREADS = 8
_NUM_REQUESTS = 32  # Number of requests to a store at a time.


class _Steps(abc.ABC):
    """Base class of `DiskSteps` and `StoredSteps`.

    Folders are given by name: "7" for a step, and names such as "7.saving" for other folders.

    Attributes:
      directory: The folder of all steps.
    """

    def __init__(self, directory: AnyPath):
        self.directory = directory

    def is_committed(self, name: str) -> bool:
        """Returns whether a folder has a commit; it may still be damaged."""
        return (self.directory / name / COMMIT_JSON).is_file()

    def identity(self, step: int) -> tuple[int, int] | None:
        """Returns a value that changes if a step is saved again, or None if it has no commit."""
        try:
            status = (self.directory / str(step) / COMMIT_JSON).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def verify(self, name: str) -> list[str]:
        """Returns a line for each error in a step's files, or [] if the step is undamaged.

        Raises:
          ConfigError: The manifest is undamaged, but has a different format version.
        """
        return self.verified_manifest(name)[1]

    def verified_manifest(self, name: str) -> tuple[Mapping[str, Any], list[str]]:
        """Returns a step's manifest, and the errors that `verify` returns."""
        manifest: Mapping[str, Any] = {}
        try:
            manifest, errors = committed_manifest(self.directory / name)
            return manifest, errors or self._file_errors(name, manifest["files"])
        except OSError as error:
            return manifest, [f"it cannot be read ({error.strerror})"]

    @abc.abstractmethod
    def _file_errors(self, name: str, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Compares files with their entries in the manifest, and returns a line for each error."""


class DiskSteps(_Steps):
    """Steps on disk.

    The invariant is that a folder whose name is a number is always complete, even if a process is
    killed: it is renamed to the number after all its files are on disk, and renamed again before
    any file is deleted.

        N            a step                        N.saving*    is being written
        N.damaged*   failed verification           N.deleting*  is being deleted
        N.abandoned* was rolled back; deleted after the next save

    A step is verified by reading every file once and comparing its digest.
    """

    directory: Path

    def numbered(self) -> list[int]:
        """Returns the steps in order, including damaged steps without a commit."""
        return sorted(int(name) for name in self._names() if _STEP.fullmatch(name))

    def committed(self) -> list[int]:
        """Returns the steps that have a commit, in order, without reading their files."""
        return [step for step in self.numbered() if self.is_committed(str(step))]

    def uncommitted(self) -> list[int]:
        """Returns the steps without a commit, in order. A save commits before it adds a step."""
        return [step for step in self.numbered() if not self.is_committed(str(step))]

    def folders_of_kind(self, *kinds: str) -> list[str]:
        """Returns the folders of the given kinds: "saving", "deleting", "damaged", "abandoned"."""
        pattern = rf"[0-9]+\.({'|'.join(kinds)})"
        return [name for name in self._names() if re.match(pattern, name)]

    def files(self, name: str) -> Mapping[str, os.stat_result]:
        """Returns the status of each file in a folder, keyed and sorted by relative path."""
        folder, found = self.directory / name, {}
        for path in sorted(folder.rglob("*")):
            # A running job may delete the folder while it is being read.
            with contextlib.suppress(FileNotFoundError):
                if not path.is_dir():
                    found[str(path.relative_to(folder))] = path.stat()
        return found

    def _file_errors(self, name: str, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
        folder, actual = self.directory / name, self.files(name)

        def error(file: str) -> str | None:
            if file not in actual:
                return "is missing"
            if file not in files:
                return "is not one of its files"
            size, expected = actual[file].st_size, files[file]["size"]
            if size != expected:
                return f"has {size} bytes, not {expected}"
            try:
                digest = _digest(folder / file)[1]
            except OSError as problem:
                return f"cannot be read ({problem.strerror})"
            # A step that was copied from an object store has no digests.
            is_same = digest == files[file].get("xxh3_128", digest)
            return None if is_same else "has changed: its digest differs from the manifest"

        names = files.keys() | actual.keys() - {COMMIT_JSON, MANIFEST_JSON}
        # Start with the largest files, so that the threads finish at about the same time.
        ordered = sorted(names, key=lambda file: -files.get(file, {"size": 0})["size"])
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            errors = zip(ordered, pool.map(error, ordered), strict=True)
            return [f"{file} {line}" for file, line in sorted(errors) if line]

    def folder_to_write(self, step: int) -> str:
        """Returns the folder to which the files of a new step are written."""
        return f"{step}.saving"

    def clear(self, step: int) -> None:
        """Removes the files of an interrupted save of this step, so that it can be saved again."""
        for name in self.folders_of_kind("saving"):
            if name.startswith(self.folder_to_write(step)):
                self.remove_leftover(name)

    def discard(self, step: int) -> None:
        """Removes the files of a failed save, unless they are a complete step."""
        self.clear(step)

    def file_entries(self, name: str) -> dict[str, dict[str, Any]]:
        """Syncs all files to disk, and returns each file's entry for the manifest."""
        folder, names = self.directory / name, list(self.files(name))
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            digests = pool.map(lambda file: _digest(folder / file, syncs=True), names)
            entries = {
                file: {"size": size, "xxh3_128": digest}
                for file, (size, digest) in zip(names, digests, strict=True)
            }
        for inner, _, _ in os.walk(folder, topdown=False):
            sync(Path(inner))
        return entries

    def commit(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Writes manifest.json and then commit.json, which completes the folder."""
        folder, text = self.directory / name, _manifest_text(manifest)
        _write_synced(folder / MANIFEST_JSON, text)
        _write_synced(folder / COMMIT_JSON, commit_text(manifest["step"], text))
        sync(folder)

    def publish(self, step: int) -> None:
        """Renames the committed folder of a new step to N, and deletes the previous step N."""
        # If the process is killed between the renames, `VerifiedSteps.repair` completes the second.
        folder = self.directory / str(step)
        replaced = self._renamed(step, "deleting") if folder.exists() else None
        try:
            os.rename(self.directory / self.folder_to_write(step), folder)
        except OSError:
            if replaced is not None:
                os.rename(self.directory / replaced, folder)
            raise
        sync(self.directory)
        if replaced is not None:
            self.remove_leftover(replaced)

    def quarantine(self, step: int) -> str:
        """Sets aside a damaged step, and returns a message about the result."""
        return f"renamed to {self._renamed(step, 'damaged')}"

    def abandon(self, step: int) -> str:
        """Sets aside a step that is rolled back, and returns a message about the result."""
        return f"renamed to {self._renamed(step, 'abandoned')}"

    def remove(self, step: int) -> None:
        """Deletes a step. An interruption leaves no incomplete step."""
        self.remove_leftover(self._renamed(step, "deleting"))

    def remove_leftover(self, name: str) -> None:
        """Deletes a folder that was set aside."""
        shutil.rmtree(self.directory / name)

    def _renamed(self, step: int, kind: str) -> str:
        """Renames `N` to the first free name of `N.KIND`, `N.KIND-2`, ..., and returns the name."""
        name, number = f"{step}.{kind}", 1
        while os.path.lexists(self.directory / name):
            number += 1
            name = f"{step}.{kind}-{number}"
        os.rename(self.directory / str(step), self.directory / name)
        sync(self.directory)
        return name

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.directory) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []


class StoredSteps(_Steps):
    """Steps in an object store, where folders cannot be renamed.

    A folder N is a step if it contains commit.json, which is written last and deleted first. A
    damaged step contains commit.damaged.json instead. Any other folder belongs to a save in
    progress, or was left by an interrupted save or deletion. A step that is saved again is deleted
    first.

    The file steps.json lists the steps, because listings may be outdated. A step is verified by
    comparing the sizes and versions of its files with the manifest. Their content is not read: the
    store itself detects damage, and each process downloads only the bytes that its devices need.

    The methods are documented in `DiskSteps`.
    """

    directory: StorePath

    def numbered(self) -> list[int]:
        return self.committed()

    def committed(self) -> list[int]:
        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            reading = pool.submit((self.directory / _STEPS_JSON).read_bytes)
            numbers = {int(name) for name in self.directory.folders() if _STEP.fullmatch(name)}
            with contextlib.suppress(FileNotFoundError):
                numbers.update(json.loads(reading.result()))
            ordered = sorted(numbers)
            are_committed = pool.map(lambda number: self.is_committed(str(number)), ordered)
            return list(itertools.compress(ordered, are_committed))

    def uncommitted(self) -> list[int]:
        return []

    def folders_of_kind(self, *kinds: str) -> list[str]:
        def kind(name: str) -> str:
            if self.is_committed(name):
                return ""
            return "damaged" if (self.directory / name / _DAMAGED_JSON).is_file() else "saving"

        names = [name for name in self.directory.folders() if _STEP.fullmatch(name)]
        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            return [
                name for name, of in zip(names, pool.map(kind, names), strict=True) if of in kinds
            ]

    def files(self, name: str) -> Mapping[str, ObjectStatus]:
        return (self.directory / name).files()

    def _file_errors(self, name: str, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
        def error(file: str) -> str | None:
            path, expected = self.directory / name / file, files[file]
            try:
                status = path.stat()
            except FileNotFoundError:
                return f"{file} is missing"
            if status.st_size != expected["size"]:
                return f"{file} has {status.st_size} bytes, not {expected['size']}"
            # A copy of a step has the same content, but may have different versions.
            if expected.get("url") == str(path) and status.tag != expected["tag"]:
                return f"{file} has changed: its version differs from the manifest"
            return None

        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            return [line for line in pool.map(error, sorted(files)) if line]

    def folder_to_write(self, step: int) -> str:
        return str(step)

    def clear(self, step: int) -> None:
        pass  # `TensorStoreWrite` removes the files.

    def discard(self, step: int) -> None:
        if not self.is_committed(str(step)):
            self.remove(step)

    def file_entries(self, name: str) -> dict[str, dict[str, Any]]:
        folder = self.directory / name
        return {
            file: {"size": status.st_size, "tag": status.tag, "url": str(folder / file)}
            for file, status in folder.newest_files().items()
        }

    def commit(self, name: str, manifest: Mapping[str, Any]) -> None:
        folder, text, step = self.directory / name, _manifest_text(manifest), manifest["step"]
        (folder / MANIFEST_JSON).write_bytes(text)
        steps = sorted({*self.committed(), step})
        (self.directory / _STEPS_JSON).write_bytes(json.dumps(steps).encode())
        (folder / COMMIT_JSON).write_bytes(commit_text(step, text))

    def publish(self, step: int) -> None:
        pass  # The folder already has its number.

    def quarantine(self, step: int) -> str:
        folder = self.directory / str(step)
        (folder / _DAMAGED_JSON).write_bytes((folder / COMMIT_JSON).read_bytes())
        (folder / COMMIT_JSON).unlink()
        return f"its {COMMIT_JSON} was renamed to {_DAMAGED_JSON}"

    def abandon(self, step: int) -> str:
        self.remove(step)
        return "deleted"

    def remove(self, step: int) -> None:
        self.remove_leftover(str(step))

    def remove_leftover(self, name: str) -> None:
        (self.directory / name / COMMIT_JSON).unlink()
        (self.directory / name).remove_folder()


StepStore = DiskSteps | StoredSteps


def steps_in(directory: AnyPath) -> StepStore:
    """Returns the steps in a directory on disk or in an object store."""
    return DiskSteps(directory) if isinstance(directory, Path) else StoredSteps(directory)


def _manifest_text(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()


def _digest(path: Path, *, syncs: bool = False) -> tuple[int, str]:
    """Returns the size and digest of a file, which is read in small chunks."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if syncs:
            os.fsync(file.fileno())
    return size, digest.hexdigest()


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
