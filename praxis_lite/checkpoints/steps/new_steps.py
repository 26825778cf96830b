"""Follows the checkpoints of a job that trains in another process, until the job ends."""

import time
from collections.abc import Callable, Iterator

from praxis_lite.checkpoints.steps.step_store import steps_in
from praxis_lite.core.errors import ConfigError
from praxis_lite.job.job_dir import JobDir

_POLL_SECONDS = 0.5


class NewSteps:
    """Yields the new steps of a job. The job may delete a step while it is being read.

    Args:
      job_dir: The job's directory.
      silent_seconds: Maximum time to wait while no process trains and no new step appears.
      note: Called with a message about skipped steps, and with the reason for ending.
    """

    def __init__(self, job_dir: JobDir, silent_seconds: float, note: Callable[[str], None]):
        self._job_dir, self._silent_seconds, self._note = job_dir, silent_seconds, note
        # The identity of each step at the last poll. The identity changes if a step is saved again.
        self._seen: dict[int, tuple[int, int]] = {}

    def wait_for_first(self) -> None:
        """Waits for the job's first step.

        Raises:
          ConfigError: No step was saved in time.
        """
        active_at, has_noted = time.monotonic(), False
        while not (self._steps() and self._job_dir.config_json.is_file()):
            if self._job_dir.is_training():
                active_at = time.monotonic()
            if not has_noted:
                self._note(f"waiting for the first checkpoint of {self._job_dir.location}")
                has_noted = True
            if time.monotonic() - active_at > self._silent_seconds:
                raise ConfigError(
                    f"--job_log_dir={self._job_dir.location}: no process trains there, and no "
                    f"checkpoint was saved within {self._silent_seconds:,} s. Start the training, "
                    "or raise --follow_seconds."
                )
            time.sleep(_POLL_SECONDS)

    def until(self, is_last: Callable[[int], bool]) -> Iterator[int]:
        """Yields the newest step whenever there are new steps.

        The iteration ends when no process trains and the job has saved its last step, or after
        `silent_seconds` without activity.

        Args:
          is_last: Function that returns whether a step is the job's last step.

        Yields:
          The step.
        """
        active_at, newest = time.monotonic(), None
        while True:
            # Check for a running process before listing steps, because a job saves its last step
            # before exiting.
            trains, steps = self._job_dir.is_training(), self._steps()
            new = [step for step, seen in steps.items() if self._seen.get(step) != seen]
            self._seen = steps
            if new:
                newest = new[-1]
                if skipped := new[:-1]:
                    numbers = ", ".join(map(str, skipped))
                    self._note(f"skipped the checkpoints of steps {numbers}: {newest} is newer")
                yield newest
            if new or trains:
                active_at = time.monotonic()
            elif newest is not None and is_last(newest):
                self._note(f"the job has ended with step {newest}")
                return
            elif time.monotonic() - active_at > self._silent_seconds:
                self._note(
                    f"no process trains in {self._job_dir.location}, and no checkpoint was saved "
                    f"within {self._silent_seconds:,} s; the newest is of step {newest}"
                )
                return
            if not new:
                time.sleep(_POLL_SECONDS)

    def _steps(self) -> dict[int, tuple[int, int]]:
        """Returns the identity of each committed step, in order."""
        self._job_dir.refresh()
        steps = steps_in(self._job_dir.checkpoints)
        found = {step: steps.identity(step) for step in steps.committed()}
        return {step: seen for step, seen in found.items() if seen is not None}
