"""ConfigError, the exception for a user's mistakes, and helpers for its messages."""

import difflib
import functools
import logging
import math
from collections.abc import Collection, Iterable, Sequence

__all__ = (
    "ConfigError", "OutOfMemory", "did_you_mean", "few", "format_bytes", "is_number", "is_whole",
    "printable", "require", "require_choice", "shown",
)


class ConfigError(ValueError):
    """A setting, an input or a file that a user can fix.

    Its message is one paragraph: what was found, what was expected, what to change. `main` prints
    only that paragraph and exits with `exit_status`; other exceptions keep their traceback.
    """

    exit_status = 2


class OutOfMemory(ConfigError):
    """The compiler, a device or the host ran out of memory."""


def require(condition: bool, setting: str, found: object, wanted: str, change: str = "") -> None:
    """Checks a setting: "SETTING is FOUND; expected WANTED. CHANGE".

    Args:
      condition: False: the setting is wrong.
      setting: its path or name, such as "Linear.num_heads" or "run.seed".
      found: its value; shortened and printable in the message.
      wanted: in a few words: "a positive integer".
      change: what to do, as whole sentences, where that does not follow from `wanted`.

    Raises:
      ConfigError: the condition is False.
    """
    if not condition:
        message = f"{setting} is {shown(repr(found))}; expected {wanted}."
        raise ConfigError(f"{message} {change}".rstrip())


def require_choice(setting: str, found: object, choices: Collection[str]) -> None:
    """Checks a setting that is a name among several.

    Raises:
      ConfigError: it is none of them; names them all, and the nearest.
    """
    if found not in list(choices):  # A dict would hash what was found.
        near = did_you_mean(str(found), choices)
        raise ConfigError(
            f"{setting} is {shown(repr(found))}; expected one of {', '.join(choices)}.{near}"
        )


def is_number(value: object) -> bool:
    """Returns True for an int or a float, which True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Returns True for an int from 1 on, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def did_you_mean(name: str, candidates: Iterable[str], *, limit: int = 3) -> str:
    """Returns ' Did you mean a, b?' with the candidates nearest to `name`, or ''."""
    # Compared without case: adamW is adamw before it is adam.
    of = {candidate.casefold(): candidate for candidate in candidates}
    near = [of[match] for match in difflib.get_close_matches(name.casefold(), of, limit, 0.5)]
    return f" Did you mean {', '.join(near)}?" if near else ""


def few(words: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Returns "a, b, c", or "a, b, c, and 4 more" where there are more than `most`."""
    more = [f"and {len(words) - most} more"] if len(words) > most else []
    return separator.join([*words[:most], *more])


def shown(text: str, limit: int = 80) -> str:
    """Returns `text` for a message: shortened, and without control characters of a terminal."""
    if len(text) > limit:
        text = f"{text[: limit - 3]}..."
    return printable(text)


def printable(text: str) -> str:
    """Returns `text` with escapes in place of control characters; lines stay lines."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def format_bytes(size: int) -> str:
    """Returns '512 B', '1.5 KiB', '3.2 GiB'."""
    power = min(int(math.log2(max(size, 1)) // 10), 5)
    return f"{size / 1024**power:.1f} {'KMGTP'[power - 1]}iB" if power else f"{size} B"


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, once in a process for each message."""
    logging.getLogger("praxis_lite").warning("WARNING: %s", message)
