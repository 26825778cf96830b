"""Names, creates and deletes step folders atomically.

The invariant on disk is that a folder whose name is a number is always complete, even if a process
is killed: it is renamed to the number after all its files are on disk, and renamed again before any
file is deleted. This file imports neither Orbax nor JAX, so that command-line tools start quickly.

    N            a step                        N.saving*    is being written
    N.damaged*   failed verification           N.deleting*  is being deleted
    N.abandoned* was rolled back; deleted after the next save

Object stores have no renames. There, a folder N is a step if it contains commit.json, which is
written last and deleted first. A damaged step contains commit.damaged.json instead, and any other
folder was left by an interrupted save or deletion.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.steps.manifest import COMMIT_JSON, MANIFEST_JSON, commit_text
from praxis_lite.checkpoints.steps.step_files import sync_directory
from praxis_lite.host.object_stores import StorePath

__all__ = ("committed_steps", "numbered_steps")

DAMAGED_JSON = "commit.damaged.json"
# Contains the steps in an object store, because listings may be outdated.
STEPS_JSON = "steps.json"

# Suffixes of folders that a killed save or deletion leaves behind.
LEFTOVERS = ("saving", "deleting")


def numbered_steps(directory: Path | StorePath) -> list[int]:
    """Returns the numbers of all step folders in order; of committed steps in an object store."""
    if isinstance(directory, StorePath):
        return _stored_steps(directory)
    return sorted(int(name) for name in _names(directory) if re.fullmatch(r"0|[1-9][0-9]*", name))


def committed_steps(directory: Path | StorePath) -> list[int]:
    """Returns the steps that have a commit, in order, without reading their files."""
    if isinstance(directory, StorePath):
        return _stored_steps(directory)
    return [step for step in numbered_steps(directory) if is_committed(directory / str(step))]


def is_committed(step_dir: Path | StorePath) -> bool:
    """Returns whether a folder has a commit; it may still be damaged."""
    return (step_dir / COMMIT_JSON).is_file()


def identity(step_dir: Path | StorePath) -> tuple[int, int] | None:
    """Returns a value that changes if the step is saved again, or None if it has no commit."""
    try:
        stat = (step_dir / COMMIT_JSON).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def set_aside(directory: Path | StorePath, *kinds: str) -> Sequence[Path | StorePath]:
    """Returns the folders of the given kinds: "saving", "deleting", "damaged", "abandoned"."""
    if isinstance(directory, StorePath):
        folders = [directory / name for name in directory.folders() if name.isdecimal()]
        states = {folder: _state(folder) for folder in folders}
        return [folder for folder, state in states.items() if state in kinds]
    pattern = rf"[0-9]+\.({'|'.join(kinds)})"
    return [directory / name for name in _names(directory) if re.match(pattern, name)]


def commit(saving: Path | StorePath, manifest: Mapping[str, Any]) -> None:
    """Writes and syncs manifest.json and then commit.json, which completes the folder."""
    text = json.dumps(manifest, indent=1) + "\n"
    if isinstance(saving, StorePath):
        (saving / MANIFEST_JSON).write_bytes(text.encode())
        steps = sorted({*_stored_steps(saving.parent), manifest["step"]})
        (saving.parent / STEPS_JSON).write_bytes(json.dumps(steps).encode())
        (saving / COMMIT_JSON).write_bytes(commit_text(manifest["step"], text.encode()).encode())
        return
    _write_synced(saving / MANIFEST_JSON, text)
    _write_synced(saving / COMMIT_JSON, commit_text(manifest["step"], text.encode()))
    sync_directory(saving)


def publish(saving: Path | StorePath, step_dir: Path | StorePath) -> None:
    """Renames a committed folder to its number, and then deletes the folder that it replaces.

    If the process is killed between the renames, `VerifiedSteps.repair` completes the rename. In an
    object store, the folder already has its number.
    """
    if isinstance(saving, StorePath) or isinstance(step_dir, StorePath):
        return
    replaced = put_aside(step_dir, "deleting") if step_dir.exists() else None
    try:
        os.rename(saving, step_dir)
    except OSError:
        if isinstance(replaced, Path):
            os.rename(replaced, step_dir)
        raise
    sync_directory(step_dir.parent)
    if replaced is not None:
        remove_leftover(replaced)


def put_aside(step_dir: Path | StorePath, kind: str) -> Path | StorePath:
    """Renames `N` to the first free name of `N.KIND`, `N.KIND-2`, ..., and returns the path.

    In an object store, this deletes commit.json, or renames it to commit.damaged.json if `kind` is
    "damaged". It returns the path of the renamed file, or of the step.
    """
    if isinstance(step_dir, StorePath):
        committed = step_dir / COMMIT_JSON
        if kind == "damaged":
            (step_dir / DAMAGED_JSON).write_bytes(committed.read_bytes())
        committed.unlink()
        return step_dir / DAMAGED_JSON if kind == "damaged" else step_dir
    target, number = step_dir.with_name(f"{step_dir.name}.{kind}"), 1
    while os.path.lexists(target):
        number += 1
        target = step_dir.with_name(f"{step_dir.name}.{kind}-{number}")
    os.rename(step_dir, target)
    sync_directory(step_dir.parent)
    return target


def remove(step_dir: Path | StorePath) -> None:
    """Deletes a step. An interruption leaves no incomplete folder under the step's number."""
    remove_leftover(put_aside(step_dir, "deleting"))


def remove_leftover(path: Path | StorePath) -> None:
    """Deletes a renamed folder, or any step folder in an object store."""
    if isinstance(path, StorePath):
        (path / COMMIT_JSON).unlink()
        path.remove_folder()
    else:
        shutil.rmtree(path)


def _stored_steps(directory: StorePath) -> list[int]:
    """Returns the numbers of the folders in an object store that have a commit, in order."""
    names = directory.folders()
    numbers = {int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name)}
    with contextlib.suppress(FileNotFoundError):
        numbers.update(json.loads((directory / STEPS_JSON).read_bytes()))
    return sorted(number for number in numbers if is_committed(directory / str(number)))


def _state(folder: StorePath) -> str:
    """Returns "" for a step, "damaged", or "saving" after an interrupted save or deletion."""
    if is_committed(folder):
        return ""
    return "damaged" if (folder / DAMAGED_JSON).is_file() else "saving"


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
