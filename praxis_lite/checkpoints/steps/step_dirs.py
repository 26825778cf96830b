"""The folders of steps on disk: which are whole, what is wrong with one, how they come and go.

A folder with a plain number is a step. It gets that name by one rename, after all in it is written
and on disk, and loses it by another before anything in it is deleted. So nothing that is
interrupted leaves a folder with a plain number that is not whole: one that is not, is damaged. (No
Orbax and no JAX here: the tools start at once.)

    N            a step                        N.saving*    is being written
    N.damaged*   what verification refused     N.deleting*  is being deleted
    N.abandoned* was rolled back; deleted after the next save
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from praxis_lite.checkpoints.steps.manifest import (
    COMMIT_JSON,
    FORMAT,
    MANIFEST_JSON,
    commit_text,
    manifest_text,
    parse_manifest,
    read_small,
    write_synced,
)
from praxis_lite.errors import ConfigError

_CHUNK_BYTES = 1 << 20
_NUM_THREADS = 8


def saving_dir(directory: Path, step: int) -> Path:
    """Returns the folder in which a step is written."""
    return directory / f"{step}.saving"


def numbered_steps(directory: Path) -> list[int]:
    """Returns the plain numbers among the folders' names, in order; whole or not."""
    return sorted(int(name) for name in _names(directory) if re.fullmatch(r"0|[1-9][0-9]*", name))


def committed_steps(directory: Path) -> list[int]:
    """Returns the steps that have a commit, in order; nothing in them is read."""
    return [step for step in numbered_steps(directory) if is_committed(directory / str(step))]


def is_committed(step_dir: Path) -> bool:
    """Returns whether a folder has a commit; not whether it is whole."""
    return (step_dir / COMMIT_JSON).is_file()


def damaged(directory: Path) -> list[str]:
    """Returns the names of the folders that were set aside as damaged."""
    return [name for name in _names(directory) if re.fullmatch(r"[0-9]+\.damaged(-[0-9]+)?", name)]


def leftovers(directory: Path) -> list[Path]:
    """Returns what a kill in a save or in a deletion left behind."""
    return [directory / x for x in _names(directory) if re.match(r"[0-9]+\.(saving|deleting)", x)]


def abandoned(directory: Path) -> list[Path]:
    """Returns what was rolled back."""
    return [directory / x for x in _names(directory) if re.match(r"[0-9]+\.abandoned", x)]


def foreign(step_dir: Path) -> str | None:
    """Returns why a step is none of this format, though whole maybe; None: it is, or is damaged."""
    if (step_dir / "manifest" / "metadata").is_file():
        return f"has the format 1 of an earlier praxis_lite; this one reads {FORMAT}"
    return None


def verify(step_dir: Path) -> list[str]:
    """Returns what is wrong with a step, a line each, naming the file; []: it is whole.

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
        found = dict(entries(step_dir))
        if not found:
            return ["it is an empty directory"]
        if COMMIT_JSON not in found:
            return [f"{COMMIT_JSON} is missing"]
        manifest, wrong = committed_manifest(step_dir)
        if wrong:
            return wrong
        return _wrong_files(step_dir, found, manifest["files"])
    except OSError as error:  # Not of one file: those are told by name.
        return [f"it cannot be read ({error.strerror})"]


def committed_manifest(step_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns a step's manifest, and what is wrong with it or its commit; reads no other file.

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


def file_digests(step_dir: Path, *, sync: bool = False) -> dict[str, dict[str, Any]]:
    """Returns size and digest of each file below a folder, by its relative name.

    Args:
      sync: everything, the folders too, is on disk when this returns.

    Raises:
      OSError: as the file system says it; ValueError: there is something else than a file.
    """
    names = []
    for name, entry in entries(step_dir):
        if not entry.is_file(follow_symlinks=False):
            raise ValueError(f"{name} is no regular file")
        names.append(name)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = list(pool.map(lambda name: _digest(step_dir / name, sync=sync), names))
    if sync:
        for folder, _, _ in os.walk(step_dir, topdown=False):
            sync_directory(Path(folder))
    files = zip(names, found, strict=True)
    return {name: {"size": size, "xxh3_128": digest} for name, (size, digest) in files}


def commit(saving: Path, manifest: Mapping[str, Any]) -> None:
    """Writes manifest.json, then commit.json, and makes sure of both: the folder is whole."""
    text = manifest_text(manifest)
    write_synced(saving / MANIFEST_JSON, text)
    write_synced(saving / COMMIT_JSON, commit_text(manifest["step"], text.encode()))
    sync_directory(saving)


def publish(saving: Path, step_dir: Path) -> None:
    """Gives a committed folder its number; what had it before is deleted only then.

    A kill between the two renames leaves the committed folder, which `Checkpoints` finds.
    """
    replaced = _set_aside(step_dir, "deleting") if step_dir.exists() else None
    try:
        os.rename(saving, step_dir)
    except OSError:
        if replaced is not None:
            os.rename(replaced, step_dir)
        raise
    sync_directory(step_dir.parent)
    if replaced is not None:
        remove_leftover(replaced)


def quarantine(step_dir: Path) -> Path:
    """Renames a step to N.damaged, N.damaged-2, ...; returns where it is now."""
    return _set_aside(step_dir, "damaged")


def abandon(step_dir: Path) -> Path:
    """Renames a step to N.abandoned, as `quarantine`."""
    return _set_aside(step_dir, "abandoned")


def remove(step_dir: Path) -> None:
    """Deletes a step; whatever stops this, no folder with its number is left."""
    remove_leftover(_set_aside(step_dir, "deleting"))


def remove_leftover(path: Path) -> None:
    """Deletes what is no step: of `leftovers`, abandoned or replaced."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def entries(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry]]:
    """Yields all below a folder that is no folder, by its relative name; follows no link.

    Raises:
      OSError: a folder cannot be read, or lies deeper than item/ocdbt.process_0/d.
    """
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
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


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            # A symbolic link with a number for a name is seen, and refused by verification.
            return sorted(x.name for x in entries if x.is_symlink() or x.is_dir())
    except FileNotFoundError:
        return []


def _wrong_files(
    step_dir: Path, found: Mapping[str, os.DirEntry], files: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    wrong, whole = [], []
    for name in sorted(files.keys() | found.keys() - {COMMIT_JSON, MANIFEST_JSON}):
        if name not in found:
            wrong.append(f"{_shown(name)} is missing")
        elif name not in files:
            wrong.append(f"{_shown(name)} is not one of its files")
        elif not found[name].is_file(follow_symlinks=False):
            wrong.append(f"{_shown(name)} is no regular file")
        else:
            size = found[name].stat(follow_symlinks=False).st_size
            if size == files[name]["size"]:
                whole.append(name)
            else:
                wrong.append(f"{_shown(name)} has {size} bytes, not {files[name]['size']}")

    def changed(name: str) -> str | None:
        try:
            digest = _digest(step_dir / name)[1]
        except OSError as error:
            return f"{_shown(name)} cannot be read ({error.strerror})"
        same = digest == files[name]["xxh3_128"]
        return None if same else f"{_shown(name)} has changed: its digest is another"

    # Largest first, so that no thread is left with a large one at the end.
    whole.sort(key=lambda name: -files[name]["size"])
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return wrong + sorted(filter(None, pool.map(changed, whole)))


def _digest(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Returns a file's size and digest; its bytes pass through one small buffer."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return size, digest.hexdigest()


def _set_aside(step_dir: Path, how: str) -> Path:
    """Renames `N` to `N.HOW`, or `N.HOW-2`, ..., whichever is free."""
    target, number = step_dir.with_name(f"{step_dir.name}.{how}"), 1
    while os.path.lexists(target):
        number += 1
        target = step_dir.with_name(f"{step_dir.name}.{how}-{number}")
    os.rename(step_dir, target)
    sync_directory(step_dir.parent)
    return target


def _shown(name: str) -> str:
    return name if name.isprintable() else ascii(name)
