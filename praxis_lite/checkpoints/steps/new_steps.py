"""The new steps of a job that trains in another process, as they are saved, until it ends."""

import time
from collections.abc import Callable, Iterator

from praxis_lite.checkpoints.steps.step_dirs import committed_steps, identity
from praxis_lite.core.errors import ConfigError
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.job_lock import is_training

_SECONDS_BETWEEN_LOOKS = 0.5


class NewSteps:
    """The steps of a job as they come. Nothing is held: a step may be deleted while it is read.

    Args:
      silent_seconds: how long to wait while no process trains and no new step comes.
      note: told, a line each, of steps that are skipped, and why it ends.
    """

    def __init__(self, job_dir: JobDir, silent_seconds: float, note: Callable[[str], None]):
        self._job_dir, self._silent_seconds, self._note = job_dir, silent_seconds, note
        # Of the steps that were there at the last look, by number: those that are saved again count
        # as new.
        self._seen: dict[int, tuple[int, int]] = {}

    def wait_for_first(self) -> None:
        """Waits for the job's first step.

        Raises:
          ConfigError: none came in time.
        """
        heard_at, is_said = time.monotonic(), False
        while not (self._job_dir.config_json.is_file() and self._steps()):
            if is_training(self._job_dir.path):
                heard_at = time.monotonic()
            if not is_said:
                self._note(f"waiting for the first checkpoint of {self._job_dir.path}")
                is_said = True
            if time.monotonic() - heard_at > self._silent_seconds:
                raise ConfigError(
                    f"--job_log_dir={self._job_dir.path}: no process trains there, and no "
                    f"checkpoint came in {self._silent_seconds:,} s. Start the training, or raise "
                    "--follow_seconds."
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def until(self, is_last: Callable[[int], bool]) -> Iterator[int]:
        """Yields the newest step of those that are new, again and again.

        It ends when no process trains and the job needs no more steps, or after the seconds of
        silence.

        Args:
          is_last: returns True if a job that ended with this step needs no more.
        """
        heard_at, newest = time.monotonic(), None
        while True:
            # Asked first: a job that has ended has saved its last step before.
            trains, steps = is_training(self._job_dir.path), self._steps()
            new = [step for step, seen in steps.items() if self._seen.get(step) != seen]
            self._seen = steps
            if new:
                newest = new[-1]
                if skipped := new[:-1]:
                    words = ", ".join(map(str, skipped))
                    self._note(f"skipped the checkpoints of steps {words}: {newest} is newer")
                yield newest
            if new or trains:
                heard_at = time.monotonic()
            elif newest is not None and is_last(newest):
                self._note(f"the job has ended with step {newest}")
                return
            elif time.monotonic() - heard_at > self._silent_seconds:
                self._note(
                    f"no process trains in {self._job_dir.path}, and no checkpoint came in "
                    f"{self._silent_seconds:,} s; the newest was of step {newest}"
                )
                return
            if not new:
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _steps(self) -> dict[int, tuple[int, int]]:
        """Returns the identity of each committed step, in order."""
        directory = self._job_dir.checkpoints
        found = {step: identity(directory / str(step)) for step in committed_steps(directory)}
        return {step: seen for step, seen in found.items() if seen is not None}
