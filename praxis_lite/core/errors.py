"""Exceptions for errors that users can fix, and helpers for their messages."""

import difflib
import functools
import logging
import math
from collections.abc import Collection, Iterable, Sequence

__all__ = (
    "ConfigError",
    "Error",
    "FailedSave",
    "NotCertified",
    "OutOfMemory",
    "PeerLost",
    "StepLost",
    "did_you_mean",
    "first_few",
    "format_bytes",
    "is_number",
    "is_positive_int",
    "printable",
    "require",
    "require_choice",
    "shortened",
)


class Error(Exception):
    """Base class for errors that users can act on.

    The message is one paragraph that describes what was found, what was expected and what to
    change. `main` prints only the message and exits with `exit_status`. Other exceptions are
    printed with their traceback.
    """

    exit_status = 2


class ConfigError(Error, ValueError):
    """A setting, an input, a file or a call is invalid; retrying without a change will fail."""


class OutOfMemory(Error):
    """The compiler, a device or the host does not have enough memory for the job."""


class PeerLost(Error):
    """Another process in the job failed or is not responding, so this process cannot continue."""

    exit_status = 1  # Unlike after status 2, clusters restart the job.


class FailedSave(Error):
    """A checkpoint could not be written; the message contains the step, the reason and a fix."""


class StepLost(ConfigError):
    """A checkpoint step is missing or damaged, or was deleted while it was being read."""


class NotCertified(Error):
    """A difference was found when certifying a step; the state is saved, and all hosts stop."""


def require(condition: bool, setting: str, found: object, expected: str, change: str = "") -> None:
    """Raises ConfigError "SETTING is FOUND; expected EXPECTED. CHANGE" unless `condition` is True.

    Args:
      condition: Whether the setting is valid.
      setting: Path or name of the setting, such as "Linear.num_heads" or "run.seed".
      found: Value of the setting. The message contains a truncated, printable repr of this value.
      expected: A short description of valid values, such as "a positive integer".
      change: Complete sentences that say what to change. Omit them if this is obvious from
        `expected`.

    Raises:
      ConfigError: The condition is False.
    """
    if not condition:
        message = f"{setting} is {shortened(repr(found))}; expected {expected}."
        raise ConfigError(f"{message} {change}".rstrip())


def require_choice(setting: str, found: object, choices: Collection[str]) -> None:
    """Checks that a setting is one of the valid names.

    Raises:
      ConfigError: `found` is not a valid name. The message lists all valid names and suggests
        similar ones.
    """
    if found not in list(choices):  # Use a list, because `found` may not be hashable.
        hint = did_you_mean(str(found), choices)
        raise ConfigError(
            f"{setting} is {shortened(repr(found))}; expected one of {', '.join(choices)}.{hint}"
        )


def is_number(value: object) -> bool:
    """Returns whether `value` is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_positive_int(value: object) -> bool:
    """Returns whether `value` is a positive int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def did_you_mean(name: str, candidates: Iterable[str], *, limit: int = 3) -> str:
    """Returns " Did you mean a, b?" with the candidates most similar to `name`, or ""."""

    # Compare without case, so that "adamW" suggests "adamw" before "adam", and without the dashes
    # of options, which all options have in common.
    def folded(text: str) -> str:
        return text.lstrip("-").casefold()

    by_folded_name = {folded(candidate): candidate for candidate in candidates}
    matches = difflib.get_close_matches(folded(name), by_folded_name, limit, cutoff=0.6)
    similar = [by_folded_name[match] for match in matches]
    return f" Did you mean {', '.join(similar)}?" if similar else ""


def first_few(words: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Returns "a, b, c", followed by ", and 4 more" if there are more than `most` words."""
    rest = [f"and {len(words) - most} more"] if len(words) > most else []
    return separator.join([*words[:most], *rest])


def shortened(text: str, limit: int = 80) -> str:
    """Returns `text` truncated to `limit` characters, with control characters escaped."""
    if len(text) > limit:
        text = f"{text[: limit - 3]}..."
    return printable(text)


def printable(text: str) -> str:
    """Returns `text` with control characters escaped, except newlines."""
    return "".join(
        char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text
    )


def format_bytes(size: int) -> str:
    """Formats a size in bytes, such as "512 B", "1.5 KiB" or "3.2 GiB"."""
    power = min(int(math.log2(max(size, 1)) // 10), 5)
    return f"{size / 1024**power:.1f} {'KMGTP'[power - 1]}iB" if power else f"{size} B"


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning once per process and message."""
    logging.getLogger(__name__).warning("%s", message)
