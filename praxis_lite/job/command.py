"""Runs a praxis_lite command, and handles its options, output, signals and errors."""

import argparse
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from praxis_lite.core.errors import ConfigError, Error, did_you_mean, printable, shortened
from praxis_lite.host.atomic_files import DISK_FULL, not_written
from praxis_lite.host.lack_of_memory import lack_of_memory, out_of_memory
from praxis_lite.host.user_errors import describe_error, explain_error
from praxis_lite.job.processes.logs import command_log, is_json
from praxis_lite.job.processes.peers import ending_together
from praxis_lite.job.processes.signals import EndsBySignal
from praxis_lite.job.processes.standard_output import (
    open_closed_streams,
    output_may_be_lost,
)

__all__ = ("Parser", "run")


def run(
    command: Callable[[], int | None],
    *,
    continues_without_output: Callable[[], bool],
    traceback_txt: Callable[[], Path | None] = lambda: None,
    logs_to_stderr: bool = False,
) -> None:
    """Runs a command, and exits with the returned status if it is nonzero.

    After an error that the user can fix, the error is printed as a paragraph wrapped at 100
    characters, and the exit status is 2. After an exception in the user's code, the exit status is
    1. After a signal, a one-line message is printed, and the exit status is 128 + the signal's
    number; for training, see `StopRequest`. Import slow modules inside the command, because
    pressing Ctrl-C before `run` is called prints a traceback.

    Args:
      command: Function that returns the exit status, or None for 0.
      continues_without_output: Function that is called if standard output is closed, and returns
        whether the command continues. If False, it exits quietly, like a program in a pipe.
      traceback_txt: Function that returns the file for tracebacks of the user's code, or None for a
        temporary file.
      logs_to_stderr: Whether the log is written to standard error, because other programs read the
        result from standard output.
    """
    open_closed_streams()
    with (
        output_may_be_lost(continues=continues_without_output),
        command_log(to_stderr=logs_to_stderr),
        EndsBySignal(),
        ending_together(),
    ):
        _add_current_directory_to_path()
        _run(command, traceback_txt)


def print_error(message: object) -> None:
    """Prints an error to standard error, wrapped at 100 characters, or as JSON."""
    if is_json():
        _log.error("%s", message)
        return
    text = printable(f"error: {message}")
    text = textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)


def _run(command: Callable[[], int | None], traceback_txt: Callable[[], Path | None]) -> None:
    # Exit inside the exception handlers, because `ending_together` reports the SystemExit's context
    # to the other processes.
    try:
        if status := command():
            sys.exit(status)
    except KeyboardInterrupt:  # Raised by user code, or outside the main thread.
        print("ended by SIGINT", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Error as error:
        # Remove the context that Fiddle appends to a constructor's exception.
        message = str(error.args[0] if error.args else "").split("\n\nFiddle context:")[0]
        print_error(message)
        sys.exit(error.exit_status)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            print_error(not_written(error.filename or "A file", error))
            sys.exit(2)
        if reason := lack_of_memory(error):
            description = (describe_error(error) or "").rstrip(".")
            print_error(out_of_memory(description or reason))
            sys.exit(2)
        explanation = explain_error(error, traceback_txt())
        if explanation is None:
            raise
        print_error(explanation.message)
        sys.exit(explanation.status)


def _add_current_directory_to_path() -> None:
    """Appends the current directory to sys.path, so that the user's packages are found.

    The directory is not inserted at the start, because `python main.py` in a folder that contains a
    random.py would then import that file.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError for unknown options and invalid values.

    Attributes:
      pax_options: The equivalents of Pax options, keyed by option name without dashes.
    """

    pax_options: Mapping[str, str] = {}

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.rstrip('.')}. --help lists the options.")

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        # Positional arguments may come between options: praxis report JOB --html=FILE JOB.
        positional = self._get_positional_actions()
        is_intermixed = any(action.nargs in ("*", "?") for action in positional)
        parse = self.parse_known_intermixed_args if is_intermixed else self.parse_known_args
        parsed, unknown = parse(args, namespace)
        if unknown:
            raise ConfigError(self._unknown_option_message(unknown[0]))
        return parsed

    def _unknown_option_message(self, given: str) -> str:
        if not given.startswith("-"):
            return f"{shortened(given)} is not an option or its value. --help lists the arguments."
        word, _, value = given.lstrip("-").partition("=")
        if word in self.pax_options:
            return (
                f"--{word} is an option of Pax. In praxis_lite it is {self.pax_options[word]}: see "
                "docs/coming_from_pax.md."
            )
        parsers = [
            self,
            *(
                choice
                for action in self._actions
                if isinstance(action, argparse._SubParsersAction)
                for choice in action.choices.values()
            ),
        ]
        actions = [action for parser in parsers for action in parser._actions]
        flags = [flag for action in actions for flag in action.option_strings]
        hint = did_you_mean(word, flags, limit=1)
        if value and "." in word:
            hint = f" Set fields of the config with --set {word}={value}."
        return f"{given} is not an option of praxis_lite.{hint} --help lists all options."


_log = logging.getLogger(__name__)
