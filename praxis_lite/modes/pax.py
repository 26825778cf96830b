"""`praxis pax`: creates a job with the weights of a Pax checkpoint."""

import argparse
from collections.abc import Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.modes.job_from_command import experiment_name, job_log_dir
from praxis_lite.modes.mode import CommandLine, Mode


class Pax(Mode):
    """Creates a job whose checkpoint at step 0 contains the weights of a Pax checkpoint."""

    name = "pax"
    summary = "creates a job with the weights of a Pax checkpoint"
    continues_without_output = True

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds --pax, --pax_step, --ignore and --new."""
        options.add_argument("--pax", metavar="DIR", help="job_log_dir of the Pax job")
        options.add_argument(
            "--pax_step",
            metavar="N",
            type=int,
            help="step of the Pax checkpoint; default: the latest",
        )
        options.add_argument(
            "--ignore", metavar="PATTERN", nargs="+", default=[], help="Pax variables to ignore"
        )
        options.add_argument(
            "--new",
            metavar="PATTERN",
            nargs="+",
            default=[],
            help="weights to initialize, because Pax lacks them",
        )

    def run(
        self,
        command: CommandLine,
        *,
        pax: str | None,
        pax_step: int | None,
        ignore: Sequence[str],
        new: Sequence[str],
    ) -> None:
        """Creates the job. Raises ConfigError if the checkpoint does not fit the experiment."""
        if pax is None:
            raise ConfigError("pax requires --pax=DIR, the job_log_dir of the Pax job.")
        experiment, directory = experiment_name(command), job_log_dir(command)

        from praxis_lite.pax.job import begin_job
        from praxis_lite.trainer.create_job import next_command

        job = begin_job(
            experiment,
            pax,
            directory,
            step=pax_step,
            settings=command.settings,
            ignore=ignore,
            new=new,
            packages=command.packages,
        )
        print(next_command(job, experiment, command.settings, command.packages))
