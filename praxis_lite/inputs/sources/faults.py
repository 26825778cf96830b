"""Faults in examples, and the error for an example with a fault."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean, shortened

__all__ = ("BadExample", "none_skipped")

# Valid names in a source's `skip`, with their meanings.
FAULTS = {
    "truncated": "the end of a file is missing",
    "damaged": "a record does not match its checksum, or an image cannot be decoded",
    "not_utf8": "text is not valid UTF-8, or has an unpaired surrogate",
    "not_json": "a line is not a JSON object",
    "missing_key": "an example lacks a key that the pipeline reads",
    "id_beyond_vocabulary": "a token id is negative, or not below the vocabulary size",
    "no_answer": "a conversation has no message to train on",
    "unknown_key": "a conversation row has an unknown key",
    "special_token": "a message, tool or document contains the text of a special token",
    "equal_answers": "the two answers of a preference pair are equal",
}


class BadExample(ConfigError):
    """Raised for an example that cannot be used; contains the location of the example.

    Attributes:
      fault: Name of the fault, a key of FAULTS.
      where: Location of the example, as in the message.
      arguments: Arguments for the constructor, to build the same error in another process.
      without_skip: Message that does not suggest `skip`, for callers without this setting.
    """

    def __init__(self, fault: str, where: str, found: str, fix: str):
        self.fault, self.where, self.arguments = fault, where, (fault, where, found, fix)
        self.without_skip = f"{where} {found}. {fix}"
        super().__init__(
            f"{self.without_skip} To skip and count such examples, add skip=[{fault!r}] to the "
            "source."
        )

    def with_skip_path(self, path: str) -> ConfigError:
        """Returns the error with the `--set` path of the source's `skip` in its message."""
        return ConfigError(
            f"{self.without_skip} To skip and count such examples, add "
            f"--set {path}=\"['{self.fault}']\""
        )

    def __reduce__(self) -> tuple:
        # The default would pickle the message instead of the constructor's arguments.
        return BadExample, self.arguments


@contextlib.contextmanager
def none_skipped() -> Iterator[None]:
    """Converts BadExample to a ConfigError without the advice to skip such examples."""
    try:
        yield
    except BadExample as error:
        raise ConfigError(error.without_skip) from None


def apply_to_example(
    function: Callable[[Mapping[str, Any]], Any], example: Mapping[str, Any], where: str
) -> Any:
    """Calls a user's function on an example, and adds the example's location to exceptions.

    Args:
      function: The function to call.
      example: The example to pass to the function.
      where: Location of the example.

    Raises:
      BadExample: The function reads a key that is not in the example.
      Exception: Any other exception raised by the function, with a note about the location.
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
    """Returns the error for an example in which a key is missing or null."""
    names = [shortened(str(name), 40) for name in sorted(map(str, example))[:20]]
    if key in example:
        return BadExample(
            "missing_key", where, f"has null for {key!r}", "Add a value, or remove the example."
        )
    return BadExample(
        "missing_key",
        where,
        f"has no key {key!r}; its keys are {names}",
        f"Change the setting for the key, or fix the data.{did_you_mean(key, names)}",
    )
