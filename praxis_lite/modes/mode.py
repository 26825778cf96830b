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
      elastic, min_processes: of --mode=train alone.
      job_dir: the job's directory, set once it is known to be this job's. The traceback of an
        error in the user's code is kept there.
      began: when the launch began, in Unix seconds; None: once it is asked to train.
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
    """What main.py does with an experiment or a job.

    A mode of your own is a subclass in a package of yours, named in full:

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

    The file of a mode is imported before options are read: it imports jax, and what needs jax, in
    `run` alone. Errors that a user can mend are ConfigErrors: one paragraph, exit status 2.

    Attributes:
      name: of the mode on the command line; a mode that is named in full needs none.
      summary: what the mode does, a line of --help.
      goes_on: True: it ends its work even if nobody reads its output any longer, for its results
        are files.
      is_of_many_processes: True: several processes (--coordinator) may run it together.
    """

    name: str = ""
    summary: str
    goes_on: bool = False
    is_of_many_processes: bool = False

    def add_options(self, options: argparse._ArgumentGroup) -> None:  # noqa: B027
        """Adds the options that this mode has besides those of `CommandLine`."""

    @abc.abstractmethod
    def run(self, command: CommandLine, **options: Any) -> int | None:
        """Does the work; returns the exit status, None for 0.

        Args:
          options: the values of `add_options`, by name.
        """
