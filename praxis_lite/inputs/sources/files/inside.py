"""Files that lie in a folder, whatever the names that another file gives them."""

import json
import os
import pathlib
from typing import Any

from praxis_lite.core.errors import ConfigError, format_bytes, shown
from praxis_lite.files.json_text import is_nested

_LARGEST_JSON = 1 << 26  # Bytes.
_DEEPEST = 100  # Of TFDS and Hugging Face, a feature within features has two or three.


def file_inside(folder: str | os.PathLike[str], name: object, named_by: str) -> str:
    """Returns the path of a plain file in a folder.

    Args:
      name: relative to the folder.
      named_by: what gives the name, for messages.

    Raises:
      ConfigError: the name leads out of the folder, by itself or by a link; or to no plain file.
    """
    root = os.path.realpath(folder)
    if not _is_name(name):
        raise ConfigError(
            f"{named_by} names {shown(repr(name))} as a file; wanted is the name of a file in "
            f"{folder}. Copy or save the dataset again."
        )
    path = os.path.realpath(os.path.join(root, name))
    is_out = os.path.isabs(name) or "://" in name or ".." in pathlib.PurePath(name).parts
    if is_out or os.path.commonpath([root, path]) != root:
        raise ConfigError(
            f"{named_by} names {shown(name)}, which leads out of {folder}; only what lies in the "
            "folder is read. Copy it there, if you trust it, and name it by its name alone."
        )
    if not os.path.isfile(path):
        how = "is no plain file" if os.path.lexists(path) else "is not there"
        raise ConfigError(
            f"{os.path.join(folder, shown(name))}, which {named_by} names, {how}. Copy or save "
            "the dataset again."
        )
    return path


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except ValueError:
        return False
    return True


def json_inside(folder: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Returns the object of a JSON file of a folder. Raises ConfigError if there is none."""
    path = file_inside(folder, name, "the format of the dataset")
    why = ""
    try:
        size = os.path.getsize(path)
        if size > _LARGEST_JSON:
            why = f"it has {format_bytes(size)}"
        else:
            with open(path, "rb") as file:
                result = json.loads(file.read(_LARGEST_JSON).decode())
            if not isinstance(result, dict):
                why = f"it is a {type(result).__name__}"
            elif is_nested(result, _DEEPEST):
                why = f"more than {_DEEPEST} brackets lie within each other"
            else:
                return result
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise ConfigError(
        f"{path} holds no JSON object ({shown(why, 200)}). Copy or save the dataset again."
    )
