"""Names, creates and deletes step folders atomically.

The invariant is that a folder whose name is a number is always complete, even if a process is
killed: it is renamed to the number after all its files are on disk, and renamed again before any
file is deleted. This file imports neither Orbax nor JAX, so that command-line tools start quickly.

    N            a step                        N.saving*    is being written
    N.damaged*   failed verification           N.deleting*  is being deleted
    N.abandoned* was rolled back; deleted after the next save
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.steps.manifest import COMMIT_JSON, MANIFEST_JSON, commit_text
from praxis_lite.checkpoints.steps.step_files import sync_directory

__all__ = ("committed_steps", "numbered_steps")

# Suffixes of folders that a killed save or deletion leaves behind.
LEFTOVERS = ("saving", "deleting")


def numbered_steps(directory: Path) -> list[int]:
    """Returns the numbers of all step folders in order, damaged or not."""
    return sorted(int(name) for name in _names(directory) if re.fullmatch(r"0|[1-9][0-9]*", name))


def committed_steps(directory: Path) -> list[int]:
    """Returns the steps that have a commit, in order, without reading their files."""
    return [step for step in numbered_steps(directory) if is_committed(directory / str(step))]


def is_committed(step_dir: Path) -> bool:
    """Returns whether a folder has a commit; it may still be damaged."""
    return (step_dir / COMMIT_JSON).is_file()


def identity(step_dir: Path) -> tuple[int, int] | None:
    """Returns a value that changes if the step is saved again, or None if it has no commit."""
    try:
        stat = (step_dir / COMMIT_JSON).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def set_aside(directory: Path, *kinds: str) -> list[Path]:
    """Returns the folders of the given kinds: "saving", "deleting", "damaged", "abandoned"."""
    pattern = rf"[0-9]+\.({'|'.join(kinds)})"
    return [directory / name for name in _names(directory) if re.match(pattern, name)]


def commit(saving: Path, manifest: Mapping[str, Any]) -> None:
    """Writes and syncs manifest.json and then commit.json, which completes the folder."""
    text = json.dumps(manifest, indent=1) + "\n"
    _write_synced(saving / MANIFEST_JSON, text)
    _write_synced(saving / COMMIT_JSON, commit_text(manifest["step"], text.encode()))
    sync_directory(saving)


def publish(saving: Path, step_dir: Path) -> None:
    """Renames a committed folder to its number, and then deletes the folder that it replaces.

    If the process is killed between the renames, `VerifiedSteps.repair` completes the rename.
    """
    replaced = put_aside(step_dir, "deleting") if step_dir.exists() else None
    try:
        os.rename(saving, step_dir)
    except OSError:
        if replaced is not None:
            os.rename(replaced, step_dir)
        raise
    sync_directory(step_dir.parent)
    if replaced is not None:
        remove_leftover(replaced)


def put_aside(step_dir: Path, kind: str) -> Path:
    """Renames `N` to the first free name of `N.KIND`, `N.KIND-2`, ..., and returns the path."""
    target, number = step_dir.with_name(f"{step_dir.name}.{kind}"), 1
    while os.path.lexists(target):
        number += 1
        target = step_dir.with_name(f"{step_dir.name}.{kind}-{number}")
    os.rename(step_dir, target)
    sync_directory(step_dir.parent)
    return target


def remove(step_dir: Path) -> None:
    """Deletes a step. An interruption leaves no incomplete folder under the step's number."""
    remove_leftover(put_aside(step_dir, "deleting"))


def remove_leftover(path: Path) -> None:
    """Deletes a folder that was renamed."""
    shutil.rmtree(path)


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
