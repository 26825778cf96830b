"""A config becomes objects; a constructor's refusal is reported with the config's path."""

import re
import traceback
from typing import Any

import fiddle as fdl

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.core.user_lines import LIBRARY_FOLDERS, user_line
from praxis_lite.host.user_errors import own_words

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


def _without_fiddle(error: Exception) -> Exception:
    """Returns the exception that a constructor raised, which Fiddle puts into a proxy."""
    while "proxy_base_exception" in vars(error):
        error = vars(error)["proxy_base_exception"]
    return error
