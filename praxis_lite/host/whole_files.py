"""Writes files atomically: readers see the old or the new file, even if the process is killed."""

import contextlib
import errno
import io
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, few

__all__ = ("DISK_FULL", "new_directory", "not_written", "write_picture", "write_whole")

# A disk, a quota or a file that is full.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# In a directory that is being written: the files that are not complete yet.
PARTIAL = ".partial"


def user_cache() -> Path:
    """Returns the folder of this user's caches of praxis_lite, by the XDG base directories."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "praxis_lite"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file next to `path`, syncs it, and then renames it.

    A killed process may leave that file, `.NAME.*.new`. Raises ConfigError if it cannot be written;
    an old file is unchanged.
    """
    # Another name for each writer: several processes may write the same file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise not_written(path, error) from error


def write_picture(path: Path, figure: Any, *, dpi: int) -> None:
    """Writes a figure of matplotlib as a PNG, as `write_whole`."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    write_whole(path, picture.getvalue())


@contextlib.contextmanager
def new_directory(path: Path, last: str) -> Iterator[Path]:
    """Yields a folder whose files are moved into a new or empty directory once all are written.

    The files of a killed process in that folder, `.partial` in the directory, are removed. If the
    body fails, the directory is unchanged.

    Args:
      path: The directory.
      last: The name of the file that is moved last; without it readers ignore the directory.

    Raises:
      ConfigError: The directory has files, or some cannot be written.
    """
    partial, moved = path / PARTIAL, []
    is_new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made ({error.strerror}). Name a new directory, below one that you "
            "can write."
        ) from error
    try:
        there = sorted(item.name for item in path.iterdir() if item.name != PARTIAL)
        if there:
            half = ", half written when a command was ended" if partial.exists() else ""
            raise ConfigError(
                f"{path} has files already ({few(there)}{half}), and only a new or an empty "
                "directory is written into. Name a new directory."
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        for name in sorted(os.listdir(partial), key=lambda name: (name == last, name)):
            _sync(partial / name)
            moved.append(path / name)
            os.replace(partial / name, path / name)
        partial.rmdir()
    except BaseException as error:
        _take_back(path, partial, moved, is_new)
        if isinstance(error, OSError) and not isinstance(error, ConfigError):
            raise not_written(path, error) from error
        raise


def _take_back(path: Path, partial: Path, moved: list[Path], result: bool) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(partial, ignore_errors=True)
        for file in moved:
            file.unlink(missing_ok=True)
        if result:
            path.rmdir()


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def not_written(path: str | os.PathLike[str], error: OSError) -> ConfigError:
    """Returns the error for a file that could not be written."""
    fix = "Make room, or fix the file system"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        fix = "Its directory was moved or deleted: put it back"
    return ConfigError(
        f"{os.fspath(path)} could not be written: {error.strerror or error}. {fix}, and launch the "
        "same command again."
    )
