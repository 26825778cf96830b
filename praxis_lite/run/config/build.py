"""A config becomes objects; errors of constructors and of files name the path in the config."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

import fiddle as fdl

from praxis_lite.core.errors import ConfigError, few, shown
from praxis_lite.core.user_lines import LIBRARY_FOLDERS, user_line
from praxis_lite.host.user_errors import own_words
from praxis_lite.run.config.paths import iterate_fields

# What Fiddle appends to an exception of a constructor.
_FIDDLE = "\n\nFiddle context:"
_PLACE = re.compile(r"\n\nFiddle context: failed to construct or call (.+?) at <root>(\S*) with ")


def build(config: fdl.Config) -> Any:
    """Returns the object that `fdl.build` makes.

    Raises:
        ConfigError: a class or function of an installed package refuses its arguments, or a class
            lacks methods; names the path. What the user's or the library's own code raises is
            raised as it is: the very exception.
    """
    try:
        return fdl.build(config)
    except Exception as error:
        place = _PLACE.search(str(error))
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        is_ours = isinstance(error, ConfigError) or innermost.startswith(LIBRARY_FOLDERS)
        if not place or is_ours or user_line(error):
            raised = _without_fiddle(error)
            raise raised.with_traceback(error.__traceback__) from raised.__cause__
        name, path = place.groups()
        path = path.lstrip(".").replace("['", ".").replace("']", "")
        words = own_words(error)
        hint = "Mend the class, or its arguments in the experiment."
        if "'rngs'" in words:
            hint = f"It is called with rngs later: write fdl.Partial({name}, ...) in its place."
        raise ConfigError(
            f"{path}: {name} cannot be made: {shown(words, 1000).rstrip('.')}. {hint}"
        ) from error


@contextlib.contextmanager
def naming_settings(config: fdl.Buildable) -> Iterator[None]:
    """Adds to a ConfigError about a file the paths of the settings that name the file."""
    try:
        yield
    except ConfigError as error:
        message, fiddle, context = str(error).partition(_FIDDLE)
        paths = [
            field.path for field in iterate_fields(config)
            if isinstance(field.value, str) and "/" in field.value and field.value in message
        ]
        if paths and not any(path in message for path in paths):
            error.args = (f"{message} (Set by {few(paths)}.){fiddle}{context}", *error.args[1:])
        raise


def _without_fiddle(error: Exception) -> Exception:
    """Returns the exception that a constructor raised, which Fiddle puts into a proxy."""
    while "proxy_base_exception" in vars(error):
        error = vars(error)["proxy_base_exception"]
    return error
