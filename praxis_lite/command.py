"""A command line whose mistakes are one paragraph, with the option that may be meant."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from praxis_lite.errors import ConfigError, did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors.

    Raises:
        ConfigError: from `parse_args`: an option's value is wrong, or there is no such option.
    """

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.rstrip('.')}. --help lists the options.")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise ConfigError(self._unknown(unknown[0]))
        return parsed

    def _unknown(self, given: str) -> str:
        word, _, value = given.lstrip("-").partition("=")
        parsers = [self, *(
            one for action in self._actions if isinstance(action, argparse._SubParsersAction)
            for one in action.choices.values()
        )]
        actions = [action for one in parsers for action in one._actions]
        flags = [flag for action in actions for flag in action.option_strings]
        hint = did_you_mean(f"--{word}", flags, limit=1)
        if value and "." in word:
            hint = f" Fields of the config are set behind --set: --set {word}={value}."
        return f"{given} is not an option of praxis_lite.{hint} --help lists them all."
