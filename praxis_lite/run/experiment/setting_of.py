"""The settings that an error is about: the names in it are looked for in the config."""

import contextlib
import fnmatch
from collections.abc import Iterator, Sequence

import fiddle as fdl

from praxis_lite.core.errors import ConfigError, few, printable
from praxis_lite.run.config.paths import iterate_fields

_MARKS = "'\"`,;:.()[]"
_SHORTEST = 3  # A text of fewer characters stands in many messages by chance.


@contextlib.contextmanager
def naming_settings(config: fdl.Buildable) -> Iterator[None]:
    """Adds to a ConfigError about a file the `--set` path of the field that names it."""
    try:
        yield
    except ConfigError as error:
        paths = settings_named(config, str(error))
        if paths and not any(path in str(error) for path in paths):
            error.args = (f"{error} (Set by {few(paths)}.)", *error.args[1:])
        raise


def settings_named(config: fdl.Buildable, message: str) -> Sequence[str]:
    """Returns the paths of the fields whose value, a path or a glob, stands in a message."""
    words = [word.strip(_MARKS) for word in message.split()]
    return [
        field.path for field in iterate_fields(config)
        if isinstance(field.value, str) and len(field.value) >= _SHORTEST
        and ("/" in field.value or field.path.endswith((".files", ".path")))
        and _is_named(field.value, message, words)
    ]


def _is_named(value: str, message: str, words: Sequence[str]) -> bool:
    if printable(value) in message:
        return True
    patterns = [pattern.strip() for pattern in value.split(",")]
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns for word in words)
