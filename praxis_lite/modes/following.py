"""--follow: processes each new checkpoint of a job that trains in another process."""

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from praxis_lite.checkpoints.steps.new_steps import NewSteps
from praxis_lite.core.errors import ConfigError, StepLost, require
from praxis_lite.job import processes
from praxis_lite.job.job_dir import JobDir, job_dir_at
from praxis_lite.modes.job_from_command import job_log_dir
from praxis_lite.modes.mode import CommandLine

if TYPE_CHECKING:
    from praxis_lite.checkpoints.steps.verified_steps import Step

_SILENT_SECONDS = 600


def add_follow(options: argparse._ArgumentGroup) -> None:
    """Adds the options --follow and --follow_seconds."""
    options.add_argument(
        "--follow",
        action="store_true",
        help="process each new checkpoint of a job training in another process, until the job "
        "ends; if there are several new checkpoints, process only the latest",
    )
    options.add_argument(
        "--follow_seconds",
        metavar="N",
        type=int,
        default=_SILENT_SECONDS,
        help="with --follow: end after this many seconds without a training process and without "
        f"a new checkpoint; default: {_SILENT_SECONDS}",
    )


def each_checkpoint(
    command: CommandLine, step: "Step", silent_seconds: int | None
) -> "Callable[[Callable[[Step], None]], None]":
    """Returns a function that takes a callback and calls it for each checkpoint to process.

    With --follow, this function first waits until the job has saved a checkpoint.

    Args:
      command: The common options.
      step: The value of --step. Without --follow, this is the only checkpoint.
      silent_seconds: The value of --follow_seconds, or None without --follow.

    Raises:
      ConfigError: An option conflicts with --follow, or no checkpoint was saved in time.
    """
    if silent_seconds is None:
        return lambda process: process(step)
    if step is not None:
        raise ConfigError(
            "--step cannot be combined with --follow, which processes each new checkpoint. Remove "
            "one of them."
        )
    require(
        silent_seconds > 0, "--follow_seconds", silent_seconds, "a number of seconds, 1 or more"
    )
    if processes.count() > 1:
        raise ConfigError(
            f"--follow runs in a single process, but {processes.count()} were started. Start it "
            "once, without --coordinator."
        )
    job_dir = job_dir_at(job_log_dir(command))
    steps = NewSteps(job_dir, silent_seconds, _log.info)
    steps.wait_for_first()
    return lambda process: _follow(job_dir, command.packages, steps, process)


def _follow(
    job_dir: JobDir, packages: Sequence[str], steps: NewSteps, process: "Callable[[Step], None]"
) -> None:
    from praxis_lite.experiment.registry import allowed_packages
    from praxis_lite.trainer.job_history import is_complete

    allowed = allowed_packages(packages)
    for step in steps.until(lambda step: is_complete(job_dir, step, allowed)):
        try:
            process(step)
        except StepLost as lost:
            _log.warning("step %s is skipped: %s", step, lost)


_log = logging.getLogger(__name__)
