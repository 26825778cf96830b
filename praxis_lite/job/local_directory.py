"""Converts a user's path of a directory to an absolute local path."""

import os
import re
from pathlib import Path

from praxis_lite.core.errors import ConfigError, shown

__all__ = ("local_directory",)


def local_directory(path: str | os.PathLike[str]) -> Path:
    """Returns an absolute path, with "~" expanded and ".." resolved; it need not exist.

    Args:
      path: A path, absolute or relative to the current directory.

    Raises:
      ConfigError: The path cannot be a local directory: a URL such as gs://bucket/job, which Python
        would treat as a directory "gs:"; or a path that is not UTF-8 or that the system rejects.
    """
    given = os.fsdecode(path)
    if not given or "\0" in given:
        problem = "has a NUL" if given else "is empty, perhaps because a shell variable is not set"
        raise ConfigError(f"The path {shown(given)!r} {problem}. Pass the path of a directory.")
    # Match a single slash, because pathlib merges consecutive slashes.
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", given):
        advice = (
            "Leave out file://"
            if scheme[1].lower() == "file"
            else "Mount it, or use a directory of this machine or of a file system that all hosts "
            "share"
        )
        raise ConfigError(
            f"{shown(given)} is a URL ({scheme[1]}), but jobs and checkpoints must be in local "
            f"directories; object stores (gs, s3) are not supported. {advice}."
        )
    directory = _absolute(os.path.expanduser(given))
    if "\\" in str(directory):
        raise ConfigError(
            f"The path {shown(str(directory), 200)!r} has a backslash, which TensorStore does not "
            "support. Rename the directory."
        )
    try:
        str(directory).encode()  # Messages and config.txt are UTF-8.
        directory.stat()
    except (FileNotFoundError, NotADirectoryError):  # The caller creates it, or reports an error.
        pass
    except UnicodeEncodeError:
        raise ConfigError(
            f"{shown(str(directory), 200)} is not UTF-8. Rename the directory, or use a symbolic "
            "link to it with a path in UTF-8."
        ) from None
    except OSError as error:  # Too long, a loop of symbolic links, in an inaccessible directory.
        raise ConfigError(
            f"{shown(given)} is not a valid path ({error.strerror}). Choose another directory."
        ) from None
    return directory


def _absolute(path: str) -> Path:
    """Makes a path absolute; resolves ".." and the symbolic links before it."""
    try:
        # TensorStore does not accept two leading slashes.
        path = os.path.join(os.getcwd(), re.sub("^/+", "/", path))
    except FileNotFoundError:
        raise ConfigError(
            f"{shown(path)} is relative, but the current directory was deleted. Change to another."
        ) from None
    parts = path.split("/")
    if ".." not in parts:
        return Path(path)
    end = len(parts) - parts[::-1].index("..")
    return Path(os.path.realpath("/".join(parts[:end])), *parts[end:])
