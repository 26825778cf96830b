"""`praxis summary`: prints a job's results from the files in its directory."""

from collections.abc import Callable

from praxis_lite.job.job_dir import JobDir, open_for_reading
from praxis_lite.modes.job_from_command import job_log_dir
from praxis_lite.modes.mode import CommandLine, Mode


class Summary(Mode):
    """Prints a job's losses, evaluations, goodput, decoded samples and files.

    Args:
      more: Function that returns an additional section of the summary, or "".
    """

    name = "summary"
    summary = "prints a job's losses, evaluations, goodput and continuations"
    argument = "job_log_dir"

    def __init__(self, more: Callable[[JobDir], str] = lambda job: ""):
        self._more = more

    def run(self, command: CommandLine) -> None:
        """Prints the summary. Raises ConfigError if there is no job."""
        job_dir = open_for_reading(job_log_dir(command), writes=False)

        from praxis_lite.trainer.summary import summary

        print(summary(job_dir, more=self._more))
