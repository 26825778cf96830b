"""Writes files atomically, so readers see either the old or the new content, even after a crash."""

import contextlib
import errno
import io
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, first_few
from praxis_lite.host.object_stores import AnyPath, ObjectChanged, StorePath

__all__ = (
    "DISK_FULL",
    "create_atomically",
    "new_directory",
    "not_written",
    "user_cache",
    "write_atomically",
    "write_picture",
)

# Errors for a full disk, an exceeded quota, and a file above the size limit.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# Name of the subfolder for incomplete files in a directory that is being written.
PARTIAL = ".partial"


def user_cache() -> Path:
    """Returns the user's cache folder for praxis_lite, according to the XDG specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "praxis_lite"


def write_atomically(path: AnyPath, content: bytes) -> None:
    """Writes a file atomically, by writing and syncing `.NAME.*.new` next to it and renaming it.

    A killed process may leave the temporary file behind. In an object store, all writes are atomic,
    and no temporary file is needed.

    Raises:
      ConfigError: The file cannot be written. An existing file is unchanged.
    """
    if isinstance(path, StorePath):
        path.write_bytes(content)
        return
    # Use a random name, because several processes may write the same file.
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


def create_atomically(path: AnyPath, content: bytes, mode: int = 0o666) -> bool:
    """Creates a file or an object with its complete content, unless it already exists.

    Args:
      path: The path. The folder must exist.
      content: The content.
      mode: Permission bits of a file.

    Returns:
      Whether this call created it. If the answer of an object store was lost, the result may be
      False although this call created the object.

    Raises:
      OSError: The file cannot be written.
    """
    if isinstance(path, StorePath):
        try:
            path.write_bytes(content, "create")
        except ObjectChanged:
            return False
        return True
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    # A hard link either creates the complete file or fails, even on network file systems.
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def write_picture(path: AnyPath, figure: Any, *, dpi: int) -> None:
    """Writes a matplotlib figure as a PNG atomically."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    write_atomically(path, picture.getvalue())


@contextlib.contextmanager
def new_directory(path: Path, last: str) -> Iterator[Path]:
    """Writes files to a new or empty directory, where they appear only once all are written.

    The body writes to the subfolder `.partial`. A killed process may leave this subfolder behind;
    the next call clears it. If the body fails, the directory is unchanged.

    Args:
      path: The directory.
      last: Name of the file to move last. Readers ignore a directory without this file.

    Yields:
      The folder to which the body writes.

    Raises:
      ConfigError: The directory is not empty, or a file cannot be written.
    """
    partial, moved = path / PARTIAL, []
    is_new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be created ({error.strerror}). Choose a directory that you can write "
            "to."
        ) from error
    try:
        existing = sorted(file.name for file in path.iterdir() if file.name != PARTIAL)
        if existing:
            reason = ", from a command that did not finish" if partial.exists() else ""
            raise ConfigError(
                f"{path} already has files ({first_few(existing)}{reason}). Choose a new or an "
                "empty directory."
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        for name in sorted(os.listdir(partial), key=lambda name: (name == last, name)):
            sync(partial / name)
            moved.append(path / name)
            os.replace(partial / name, path / name)
        partial.rmdir()
    # Undo also after an interrupt, so that the command can be repeated.
    except BaseException as error:
        _undo(path, partial, moved, is_new)
        if isinstance(error, OSError) and not isinstance(error, ConfigError):
            raise not_written(path, error) from error
        raise


def _undo(path: Path, partial: Path, moved: list[Path], is_new: bool) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(partial, ignore_errors=True)
        for file in moved:
            file.unlink(missing_ok=True)
        if is_new:
            path.rmdir()


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a directory, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def not_written(path: str | os.PathLike[str], error: OSError) -> ConfigError:
    """Returns the error for a file that could not be written."""
    fix = "Free disk space or fix the file system"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        fix = "Its directory was moved or deleted: restore it"
    return ConfigError(
        f"{os.fspath(path)} could not be written: {error.strerror or error}. {fix}, and run the "
        "same command again."
    )
