"""Converts a directory path given by a user to an absolute local path."""

import os
import re
from pathlib import Path

from praxis_lite.core.errors import ConfigError, shortened

__all__ = ("local_directory",)


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
        advice = (
            "Remove file://"
            if scheme[1].lower() == "file"
            else "Use a directory of this machine, or of a file system that all hosts share"
        )
        raise ConfigError(
            f"{shortened(given)} is a URL ({scheme[1]}), but jobs and checkpoints must be in local "
            f"directories; object stores (gs, s3) are not supported. {advice}."
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
