"""What may be wrong with an example, and the error that names its place."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean, shown

__all__ = ("BadExample", "none_skipped")

# By the names that a source's `skip` takes.
FAULTS = {
    "truncated": "the end of a file is missing",
    "damaged": "a record is not what its checksum says, or an image cannot be read",
    "not_utf8": "text is not UTF-8, or has half of a character",
    "not_json": "a line is no JSON object",
    "missing_key": "an example lacks the key that is asked for",
    "id_beyond_vocabulary": "an id is negative, or not below the vocabulary's size",
    "no_answer": "a conversation has nothing to learn",
    "unknown_key": "a row of a conversation has a key that is not read",
    "equal_answers": "the answers of a pair are the same",
}


class BadExample(ConfigError):
    """An example that cannot be used: where it stands, what was found, how to mend it.

    Attributes:
      fault: the name of what is wrong, of FAULTS.
      where: the example's place, as the message has it.
      given: the arguments, to make the same error in another process.
      without_skip: the message, for what has no `skip`.
    """

    def __init__(self, fault: str, where: str, found: str, fix: str):
        self.fault, self.where, self.given = fault, where, (fault, where, found, fix)
        self.without_skip = f"{where} {found}. {fix}"
        super().__init__(
            f"{self.without_skip} Or leave out what is like it, and have it counted: "
            f"skip=[{fault!r}] of the source."
        )

    def of_setting(self, path: str) -> ConfigError:
        """Returns the error with the whole path of the source's setting, for --set."""
        return ConfigError(
            f"{self.without_skip} Or leave out what is like it, and have it counted: "
            f"--set {path}=\"['{self.fault}']\""
        )

    def __reduce__(self) -> tuple:
        # Worker processes send it as what it was made of.
        return BadExample, self.given


@contextlib.contextmanager
def none_skipped() -> Iterator[None]:
    """Makes BadExample a plain ConfigError, where there is no `skip`."""
    try:
        yield
    except BadExample as error:
        raise ConfigError(error.without_skip) from None


def applied(
    function: Callable[[Mapping[str, Any]], Any], example: Mapping[str, Any], where: str
) -> Any:
    """Calls a user's function on an example.

    Raises:
      BadExample: the function asks for a key that the example lacks; names `where` it stands.
      Whatever else the function raises, with a note of where.
    """
    try:
        return function(example)
    except KeyError as error:
        if error.args and isinstance(error.args[0], str) and error.args[0] not in example:
            raise missing_key(error.args[0], example, where) from error
        raise
    except BadExample:
        raise
    except Exception as error:
        error.add_note(f"It was raised for {where}.")
        raise


def missing_key(key: str, example: Mapping[str, Any], where: str) -> BadExample:
    """Returns the error for an example without a key, or with null there."""
    names = [shown(str(name), 40) for name in sorted(map(str, example))[:20]]
    if key in example:
        return BadExample(
            "missing_key", where, f"has null as {key!r}", "Write it, or leave the example out."
        )
    return BadExample(
        "missing_key", where, f"has no {key!r}; it has {names}",
        f"Name the key that holds it, or mend the data.{did_you_mean(key, names)}",
    )
