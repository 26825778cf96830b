"""The base class of subcommands that are not modes."""

import abc
import argparse
from collections.abc import Sequence

from praxis_lite.job.command import Parser

__all__ = ("Program",)


class Program(abc.ABC):
    """A subcommand that does not have the common options of modes, such as `praxis checkpoints`.

    Other packages add programs through entry points in the group `praxis_lite.programs`. The file
    of a program is imported at every start, so import slow modules inside `run`.

    Attributes:
      name: Name of the subcommand.
      summary: One line for `praxis --help`.
      continues_without_output: Whether the program finishes its work even if its standard output is
        closed, because its results are files.
      logs_to_stderr: Whether the log is written to standard error, because other programs read the
        result from standard output.
    """

    name: str
    summary: str
    continues_without_output: bool = False
    logs_to_stderr: bool = False

    def add_arguments(self, parser: Parser) -> None:  # noqa: B027
        """Adds the program's options and subcommands to its parser."""

    @abc.abstractmethod
    def run(self, args: argparse.Namespace) -> int | None:
        """Runs the program with its arguments; returns the exit status, or None for 0."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses the arguments after the name of the program."""
        return self.parser().parse_args(argv)

    def parser(self) -> Parser:
        """Returns the parser of the program's arguments."""
        parser = Parser(
            prog=f"praxis {self.name}",
            description=f"{self.summary[0].upper()}{self.summary[1:]}.",
            allow_abbrev=False,
        )
        self.add_arguments(parser)
        return parser
