"""`praxis profile`: prints the time and memory of a job's profiled steps."""

import argparse

from praxis_lite.core.errors import require
from praxis_lite.job.job_dir import open_for_reading
from praxis_lite.modes.job_from_command import job_log_dir
from praxis_lite.modes.mode import CommandLine, Mode


class Profile(Mode):
    """Prints the time and memory tables of a job's profile."""

    name = "profile"
    summary = "prints the time and memory of a job's profiled steps, by layer and collective"
    argument = "job_log_dir"

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds --step."""
        options.add_argument(
            "--step",
            metavar="N",
            type=int,
            help="first step of the profile; default: the latest profile",
        )

    def run(self, command: CommandLine, *, step: int | None) -> None:
        """Prints the tables; raises ConfigError if the job or its profile does not exist."""
        require(step is None or step >= 1, "--step", step, "1 or more")
        job_dir = open_for_reading(job_log_dir(command), writes=False)

        from praxis_tools.profile.tables import folder_of, tables_of

        print(tables_of(folder_of(job_dir, step)))
