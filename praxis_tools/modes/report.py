"""`main.py --mode=report`: compares jobs, as text and as a page."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import file_to_write

_EVERY = 5.0


class Report(Mode):
    """Compares jobs by their files: curves, configs, samples, evaluations, and time."""

    name = "report"
    summary = "compares jobs: curves, settings, samples, time; while they train, too"

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds the jobs, --html, --follow and --every."""
        options.add_argument(
            "jobs", metavar="JOB", nargs="*", help="directories of jobs, besides --job_log_dir",
        )
        options.add_argument(
            "--html", metavar="FILE", type=file_to_write("report.html"),
            help="where to write it as a page as well",
        )
        options.add_argument(
            "--follow", action="store_true",
            help="repeat until none of the jobs trains any longer",
        )
        options.add_argument(
            "--every", metavar="S", type=_seconds,
            help=f"with --follow: seconds between two readings; default: {_EVERY:g}",
        )

    def run(
        self, command: CommandLine, *, jobs: Sequence[str], html: Path | None, follow: bool,
        every: float | None,
    ) -> None:
        """Reports; raises ConfigError if a directory is no job's."""
        if every is not None and not follow:
            raise ConfigError(
                f"--every={every:g} goes with --follow: add that, or leave --every out."
            )
        if command.exp is not None or command.settings:
            raise ConfigError(
                "--mode=report reads jobs, and has no use for --exp or --set. Leave them out."
            )
        from praxis_tools.report.job_reader import named_jobs
        from praxis_tools.report.report import ReportReader, print_reports

        also = [command.job_log_dir] if command.job_log_dir is not None else []
        print_reports(
            ReportReader(named_jobs([*jobs, *also])), html=html,
            follow_seconds=(every or _EVERY) if follow else None,
        )


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{word} is not a number of seconds from 0.1 to 3600")
    return seconds
