"""A config becomes objects; a constructor's refusal is reported with the config's path."""

import re
import traceback
from pathlib import Path
from typing import Any

import fiddle as fdl

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.core.user_lines import user_line
from praxis_lite.host.user_errors import own_words

_PACKAGE = Path(__file__).parents[2]
_PLACE = re.compile(r"\n\nFiddle context: failed to construct or call (.+?) at <root>(\S*) with ")


def build(config: fdl.Config) -> Any:
    """Returns the object that `fdl.build` makes.

    Raises:
        ConfigError: a class or function of an installed package refuses its arguments, or a class
            lacks methods; names the path. What the user's or the library's own code raises is
            raised as it is.
    """
    try:
        return fdl.build(config)
    except ConfigError:
        raise
    except Exception as error:
        place = _PLACE.search(str(error))
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if not place or user_line(error) or Path(innermost).is_relative_to(_PACKAGE):
            raise
        name, path = place.groups()
        path = path.lstrip(".").replace("['", ".").replace("']", "")
        words = own_words(error)
        hint = "Mend the class, or its arguments in the experiment."
        if "'rngs'" in words:
            hint = f"It is called with rngs later: write fdl.Partial({name}, ...) in its place."
        raise ConfigError(
            f"{path}: {name} cannot be made: {shown(words, 1000).rstrip('.')}. {hint}"
        ) from error
