"""A command of the library: its options, its output, its signals, and its errors in a paragraph."""

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from praxis_lite.core.errors import ConfigError, did_you_mean, printable
from praxis_lite.host.lack_of_memory import lack_of_memory, out_of_memory
from praxis_lite.host.user_errors import described, explained
from praxis_lite.host.whole_files import DISK_FULL, not_written
from praxis_lite.job.processes.peers import ending_together
from praxis_lite.job.processes.signals import EndsBySignal
from praxis_lite.job.processes.standard_output import (
    open_what_is_closed,
    output_may_be_lost,
)

__all__ = ("Parser", "run")


def run(
    command: Callable[[], int | None],
    *,
    goes_on: bool | Callable[[], bool],
    traceback_txt: Callable[[], Path | None] = lambda: None,
    wraps: bool = False,
) -> None:
    """Runs a command; exits with its status if that is not 0.

    It is 2, after one paragraph, for errors that the user can fix, and 1 for an exception in the
    user's code. A signal ends it with one line and 128 + its number; for training see
    `StopRequest`. The command itself imports slow modules, because a signal before `run` ends in
    a traceback.

    Args:
        command: returns the status, None for 0.
        goes_on: the command continues without its standard output; otherwise it ends quietly, as
            programs in a pipe do. A function is called when the output is lost.
        traceback_txt: the file for the traceback of the user's code; None: a new temporary one.
        wraps: errors into lines of 100; else an error is one line, for scripts.
    """
    open_what_is_closed()
    with output_may_be_lost(goes_on=goes_on), EndsBySignal(), ending_together():
        _find_users_packages()
        _run(command, traceback_txt, wraps)


def status_of(command: Callable[[], int | None], *, goes_on: bool) -> int:
    """Returns the exit status of a command that `run` runs."""
    try:
        run(command, goes_on=goes_on)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def print_error(words: object, *, wraps: bool = True) -> None:
    """Prints a paragraph to standard error, in lines of 100 letters or in a single line."""
    text = printable(f"error: {words}")
    if wraps:
        text = textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)


def _run(
    command: Callable[[], int | None], traceback_txt: Callable[[], Path | None], wraps: bool
) -> None:
    # Each exit has the exception as its context, from which `ending_together` informs the others.
    try:
        if status := command():
            sys.exit(status)
    except KeyboardInterrupt:  # Not by a signal, or not in the main thread.
        print("ended by SIGINT", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except ConfigError as error:
        # Without what Fiddle appends to an exception of a constructor.
        words = str(error.args[0] if error.args else "").split("\n\nFiddle context:")[0]
        print_error(words, wraps=wraps)
        sys.exit(error.exit_status)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            print_error(not_written(error.filename or "A file", error), wraps=wraps)
            sys.exit(2)
        if lacking := lack_of_memory(error):
            where = (described(error) or "").rstrip(".")
            print_error(out_of_memory(where or lacking), wraps=wraps)
            sys.exit(2)
        result = explained(error, traceback_txt())
        if result is None:
            raise
        print_error(result.words, wraps=wraps)
        sys.exit(result.status)


def _find_users_packages() -> None:
    """Puts the current directory at the end of sys.path.

    So the user's packages are found without an installation. It is at the end, because
    `python main.py` in a folder with a random.py must not import that file.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors.

    Raises:
        ConfigError: from `parse_args`: an option's value is wrong, or there is no such option.
    """

    pax_options: Mapping[str, str] = {}  # The counterparts here, by name without dashes.

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.rstrip('.')}. --help lists the options.")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        # Arguments without dashes may stand between options: --mode=report JOB --html=FILE JOB.
        has_arguments = any(action.nargs == "*" for action in self._get_positional_actions())
        parse = self.parse_known_intermixed_args if has_arguments else self.parse_known_args
        parsed, unknown = parse(args, namespace)
        if unknown:
            raise ConfigError(self._unknown(unknown[0]))
        return parsed

    def _unknown(self, given: str) -> str:
        word, _, value = given.lstrip("-").partition("=")
        if word in self.pax_options:
            return (
                f"There is no option --{word}. That is an option of Pax's; here it is "
                f"{self.pax_options[word]}: docs/coming_from_pax.md."
            )
        parsers = [self, *(
            choice for action in self._actions if isinstance(action, argparse._SubParsersAction)
            for choice in action.choices.values()
        )]
        actions = [action for parser in parsers for action in parser._actions]
        flags = [flag for action in actions for flag in action.option_strings]
        hint = did_you_mean(f"--{word}", flags, limit=1)
        if value and "." in word:
            hint = f" Fields of the config are set behind --set: --set {word}={value}."
        return f"{given} is not an option of praxis_lite.{hint} --help lists them all."
