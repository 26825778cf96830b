"""`praxis report`: compares jobs, as text and as an HTML page."""

import argparse
from collections.abc import Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import file_to_write

_REFRESH_SECONDS = 5.0


class Report(Mode):
    """Compares the curves, configs, samples, evaluations and times of jobs."""

    name = "report"
    summary = "compares jobs, finished or running: curves, settings, samples, times"
    argument = None

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds the jobs, --html, --follow and --every."""
        options.add_argument(
            "jobs",
            metavar="JOB",
            nargs="*",
            help="job directories, in addition to --job_log_dir",
        )
        options.add_argument(
            "--html",
            metavar="FILE",
            type=file_to_write("report.html"),
            help="write the report as an HTML page",
        )
        options.add_argument(
            "--follow",
            action="store_true",
            help="repeat the report until all jobs have ended",
        )
        options.add_argument(
            "--every",
            metavar="S",
            type=_seconds,
            help=f"with --follow: seconds between reports; default: {_REFRESH_SECONDS:g}",
        )

    def run(
        self,
        command: CommandLine,
        *,
        jobs: Sequence[str],
        html: AnyPath | None,
        follow: bool,
        every: float | None,
    ) -> None:
        """Prints the report; raises ConfigError if a directory contains no job."""
        if every is not None and not follow:
            raise ConfigError(
                f"--every={every:g} requires --follow. Add --follow or remove --every."
            )
        if command.exp is not None or command.settings:
            raise ConfigError(
                "--exp, --config and --set have no effect with `praxis report`, which only reads "
                "jobs. Remove them."
            )
        from praxis_tools.report.job_reader import named_jobs
        from praxis_tools.report.report import ReportReader, print_reports

        job_log_dir = [command.job_log_dir] if command.job_log_dir is not None else []
        print_reports(
            ReportReader(named_jobs([*jobs, *job_log_dir])),
            html=html,
            follow_seconds=(every or _REFRESH_SECONDS) if follow else None,
        )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 to 3600")
    return seconds
