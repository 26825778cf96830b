"""The one exception for what a user can get wrong, and the words that go with it."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting, an input or a file that a user can mend.

    Its message is one paragraph: what was found, what was wanted, what to change. `main` prints
    just that paragraph and exits with status 2; every other exception keeps its traceback.
    """


def did_you_mean(name: str, candidates: Iterable[str], *, limit: int = 3) -> str:
    """Returns ' Did you mean a, b?' with the candidates nearest to `name`, or ''."""
    near = difflib.get_close_matches(name, list(candidates), n=limit, cutoff=0.5)
    return f" Did you mean {', '.join(near)}?" if near else ""
