"""Converts a directory that a user specified to an absolute path or an object store path."""

import contextlib
import os
import re
from pathlib import Path

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.host.atomic_files import new_directory
from praxis_lite.host.object_stores import AnyPath, StorePath, is_store_url
from praxis_lite.host.places import is_url, local_folder, uploaded

__all__ = ("directory", "local_directory", "output_directory")


def directory(path: str | os.PathLike[str] | StorePath) -> AnyPath:
    """Returns the absolute path of a local directory, or a path in an object store.

    An hf:// repository is downloaded.

    Raises:
      ConfigError: See `local_directory`, `StorePath.opened` and `local_folder`.
    """
    if isinstance(path, StorePath) or is_store_url(path):
        return StorePath.opened(path)
    return local_directory(local_folder(path) if is_url(path) else path)


def output_directory(
    path: str | os.PathLike[str], last: str
) -> contextlib.AbstractContextManager[Path]:
    """Returns a context manager for writing a new directory, which is complete once `last` exists.

    For a URL, the directory is temporary, and is uploaded at exit.

    Args:
      path: The directory, or a URL.
      last: Name of the file to write last.
    """
    return uploaded(path, last) if is_url(path) else new_directory(local_directory(path), last)


def local_directory(path: str | os.PathLike[str]) -> Path:
    """Makes a path absolute, expands "~" and resolves "..". The path need not exist.

    Args:
      path: A path, absolute or relative to the current directory.

    Raises:
      ConfigError: The path cannot be a local directory, because it is a URL such as
        gs://bucket/job, is not UTF-8, or is rejected by the system.
    """
    given = os.fsdecode(path)
    if not given or "\0" in given:
        problem = (
            "contains a NUL" if given else "is empty, perhaps because a shell variable is not set"
        )
        raise ConfigError(f"The path {shortened(given)!r} {problem}. Pass the path of a directory.")
    # Match a single slash, because pathlib merges consecutive slashes.
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", given):
        advice = "Use a directory of this machine, or of a file system that all hosts share"
        if scheme[1].lower() == "file":
            advice = "Remove file://"
        elif not given.startswith(f"{scheme[1]}://") and is_store_url(f"{scheme[1]}://"):
            advice = "Pass the URL as a str, because pathlib merges slashes"
        raise ConfigError(
            f"{shortened(given)} is a URL ({scheme[1]}); expected a local directory. {advice}."
        )
    directory = _absolute(os.path.expanduser(given))
    if "\\" in str(directory):
        raise ConfigError(
            f"The path {shortened(str(directory), 200)!r} has a backslash, which TensorStore does "
            "not support. Rename the directory."
        )
    try:
        str(directory).encode()  # Messages and config.txt are UTF-8.
        directory.stat()
    except (FileNotFoundError, NotADirectoryError):  # The caller creates it or raises an error.
        pass
    except UnicodeEncodeError:
        raise ConfigError(
            f"{shortened(str(directory), 200)} is not UTF-8. Rename the directory, or use a "
            "symbolic link to it with a path in UTF-8."
        ) from None
    except OSError as error:  # Too long, a loop of symbolic links, or in an inaccessible directory.
        raise ConfigError(
            f"{shortened(given)} is not a valid path ({error.strerror}). Choose a different "
            "directory."
        ) from None
    return directory


def _absolute(path: str) -> Path:
    """Makes a path absolute, and resolves ".." and symbolic links before it."""
    try:
        # TensorStore does not accept two leading slashes.
        path = os.path.join(os.getcwd(), re.sub("^/+", "/", path))
    except FileNotFoundError:
        raise ConfigError(
            f"{shortened(path)} is relative, but the current directory was deleted. Change to an "
            "existing directory."
        ) from None
    parts = path.split("/")
    if ".." not in parts:
        return Path(path)
    end = len(parts) - parts[::-1].index("..")
    return Path(os.path.realpath("/".join(parts[:end])), *parts[end:])
