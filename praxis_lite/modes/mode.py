"""The base class of modes (`praxis MODE`), and the common options."""

import abc
import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from praxis_lite.job.processes.logs import LogFormat
from praxis_lite.job.processes.start import START_SECONDS

if TYPE_CHECKING:
    from praxis_lite.job.job_dir import JobDir


@dataclasses.dataclass(kw_only=True)
class CommandLine:
    """The options that are common to all modes.

    Attributes:
      mode: Name of the mode.
      exp: The experiment, EXP in `praxis MODE EXP`.
      packages: The option --packages.
      job_log_dir: The option --job_log_dir, or JOB in `praxis MODE JOB`.
      settings: The settings in --config and --set.
      verbose: The option --verbose.
      quiet: The option --quiet.
      log_format: The option --log_format.
      coordinator: The option --coordinator.
      num_processes: The option --num_processes.
      process_id: The option --process_id.
      start_seconds: The option --start_seconds.
      elastic: The option --elastic, which only `praxis train` has.
      min_processes: The option --min_processes, which only `praxis train` has.
      job_dir: The job directory, set after it has been opened. Tracebacks of errors in the user's
        code are stored there.
      began: Start of the launch in Unix seconds. If None, the time when `begin_launch` is called.
    """

    mode: str = "train"
    exp: str | None = None
    packages: Sequence[str] = ()
    job_log_dir: str | None = None
    settings: Sequence[str] = ()
    verbose: bool = False
    quiet: bool = False
    log_format: LogFormat = LogFormat.TEXT
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_seconds: int = START_SECONDS
    elastic: bool = False
    min_processes: int | None = None
    job_dir: "JobDir | None" = None
    began: float | None = None


class Mode(abc.ABC):
    """A subcommand that works on an experiment or a job, such as `praxis train`.

    To add a mode, write a subclass in your package, and use its full name as the subcommand:

        # mypackage/modes.py
        from praxis_lite.modes import Mode

        class Latency(Mode):
            summary = "times the forward pass"

            def add_options(self, options):
                options.add_argument("--repeats", metavar="N", type=int, default=7)

            def run(self, command, *, repeats):
                from praxis_lite.modes import experiment_of, job_on_mesh

                launched = experiment_of(command)
                with job_on_mesh(command, launched, "load") as job:
                    print(time_of(job.partitioner, repeats))

        praxis mypackage.modes.Latency lm.PyDocs --packages=mypackage --repeats=3

    The file of a mode is imported before options are parsed, so import jax and modules that need
    jax inside `run`. Raise ConfigError for errors that the user can fix. The error is printed as a
    paragraph, and the exit status is 2.

    Attributes:
      name: Name of the mode on the command line. Not needed for modes that are specified as
        module.Class.
      summary: One line for --help.
      argument: The option that is set by the first argument after the mode: "exp" if the mode
        creates an experiment, "job_log_dir" if it reads a job, or None if the mode declares its
        own arguments.
      continues_without_output: Whether the mode finishes its work even if its standard output is
        closed, because its results are files.
      is_of_many_processes: Whether the mode supports several processes (--coordinator).
    """

    name: str = ""
    summary: str
    argument: Literal["exp", "job_log_dir"] | None = "exp"
    continues_without_output: bool = False
    is_of_many_processes: bool = False

    def add_options(self, options: argparse._ArgumentGroup) -> None:  # noqa: B027
        """Adds the mode's options to the parser, in addition to those of `CommandLine`."""

    @abc.abstractmethod
    def run(self, command: CommandLine, *args: Any, **options: Any) -> int | None:
        """Runs the mode.

        Subclasses declare their options as keyword-only parameters. `*args` is never used, but lets
        type checkers accept such overrides.

        Args:
          command: The common options.
          *args: Never passed; lets type checkers accept any keyword arguments in subclasses.
          **options: Values of the mode's options, keyed by name.

        Returns:
          The exit status, or None for 0.
        """
