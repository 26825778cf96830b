"""JSON in a checkpoint that anyone may have written."""

from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import is_nested, parse_json
from praxis_lite.run.checkpoints.steps.manifest import read_small

_MAX_DEPTH = 100
_MAX_RANK = 32  # TensorStore's.


def loads(text: bytes, name: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
      ConfigError: it is no JSON, has a key twice in one object, or is nested too deeply.
    """
    try:
        result = parse_json(text.decode())
    except ValueError:
        raise ConfigError(f"{name} is no JSON, or has a key twice") from None
    if is_nested(result, _MAX_DEPTH):
        raise ConfigError(f"{name} is nested too deeply")
    return result


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Returns the object in a JSON file below a folder.

    Raises:
      ConfigError: it cannot be read, or is no JSON object.
    """
    try:
        result = loads(read_small(folder / name), name)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror})") from None
    if not isinstance(result, dict):
        raise ConfigError(f"{name} is no JSON object")
    return result


def is_shape(found: Any) -> bool:
    """Returns True for a list of at most 32 whole numbers from 0 to 2^62."""
    return (
        isinstance(found, list)
        and len(found) <= _MAX_RANK
        and all(type(dim) is int and 0 <= dim < 2**62 for dim in found)
    )
