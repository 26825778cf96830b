"""The path of a directory that a user names, made absolute."""

import os
import re
from pathlib import Path

from praxis_lite.core.errors import ConfigError, shown

__all__ = ("local_directory",)


def local_directory(path: str | os.PathLike[str]) -> Path:
    """Returns an absolute path without "..", "~" at its start expanded; there may be nothing there.

    Raises ConfigError for what can be no directory: an address such as gs://bucket/job, for which
    Python would make a local one called "gs:"; and for a path that the system, or UTF-8, refuses.
    """
    given = os.fsdecode(path)
    if not given or "\0" in given:
        what = "has a NUL" if given else "is empty, as where a variable of the shell is not set"
        raise ConfigError(f"The path {shown(given)!r} {what}. Name a directory.")
    # One slash is enough: a Path has no two in a row.
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", given):
        advice = (
            "Leave out file://"
            if scheme[1].lower() == "file"
            else "Mount it, or name a directory of this machine or of a file system that all its "
            "hosts share"
        )
        raise ConfigError(
            f"{shown(given)} is an address ({scheme[1]}), but jobs and checkpoints are "
            f"kept in, and read from, only local directories; object stores (gs, s3) are not "
            f"supported. {advice}."
        )
    directory = _absolute(os.path.expanduser(given))
    if "\\" in str(directory):
        raise ConfigError(
            f"The path {shown(str(directory), 200)!r} has a backslash, which TensorStore does not "
            "read. Rename the directory."
        )
    try:
        str(directory).encode()  # Messages, config.txt and the terminal are UTF-8.
        directory.stat()
    except (FileNotFoundError, NotADirectoryError):  # It may yet be made, or is refused by name.
        pass
    except UnicodeEncodeError:
        raise ConfigError(
            f"{shown(str(directory), 200)} is not UTF-8. Rename the directory, or reach it by a "
            "symbolic link whose path is."
        ) from None
    except OSError as error:  # Too long, a loop of symbolic links, below a closed directory.
        raise ConfigError(
            f"{shown(given)} is no path ({error.strerror}). Name another directory."
        ) from None
    return directory


def _absolute(path: str) -> Path:
    """Returns an absolute path; what stands before its last ".." is resolved, symlinks too."""
    try:
        # Two slashes in front mean one, but not to TensorStore.
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
