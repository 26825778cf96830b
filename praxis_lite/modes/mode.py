"""A mode of the command line: what `--mode` names."""

import abc
import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from praxis_lite.job.processes.start import START_SECONDS

if TYPE_CHECKING:
    from praxis_lite.job.job_dir import JobDir


@dataclasses.dataclass(kw_only=True)
class CommandLine:
    """The options that every mode takes, as they were given.

    Attributes:
      elastic, min_processes: Of --mode=train alone.
      job_dir: The job's directory, set once it is known to belong to this job. The traceback of an
        error in the user's code is stored there.
      began: When the launch began, in Unix seconds; None: when `begun` is called.
    """

    mode: str = "train"
    exp: str | None = None
    packages: Sequence[str] = ()
    job_log_dir: str | None = None
    settings: Sequence[str] = ()
    list: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_seconds: int = START_SECONDS
    elastic: bool = False
    min_processes: int | None = None
    job_dir: "JobDir | None" = None
    began: float | None = None


class Mode(abc.ABC):
    """An action of main.py on an experiment or a job.

    A custom mode is a subclass in your package, named in full:

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

        main.py --packages=mypackage --mode=mypackage.modes.Latency --exp=lm.PyDocs --repeats=3

    The file of a mode is imported before options are read: import jax, and modules that need jax,
    inside `run`. Errors that a user can fix are ConfigErrors: one paragraph, exit status 2.

    Attributes:
      name: The mode's name on the command line; a mode that is named in full needs none.
      summary: A line of --help.
      goes_on: True: it finishes its work even if its output is no longer read, because its results
        are files.
      is_of_many_processes: True: several processes (--coordinator) may run it together.
    """

    name: str = ""
    summary: str
    goes_on: bool = False
    is_of_many_processes: bool = False

    def add_options(self, options: argparse._ArgumentGroup) -> None:  # noqa: B027
        """Adds the options that this mode has in addition to those of `CommandLine`."""

    @abc.abstractmethod
    def run(self, command: CommandLine, **options: Any) -> int | None:
        """Does the work; returns the exit status, None for 0.

        Args:
          options: The values of the options of `add_options`, by name.
        """
