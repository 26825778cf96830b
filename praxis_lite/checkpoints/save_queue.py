"""The saves of a job: a single save at a time, and the response when a save fails."""

import itertools
import time
from collections.abc import Callable
from typing import Any

from praxis_lite.checkpoints.background_save import (
    BackgroundSave,
    FailedSave,
    OpenFolder,
    why,
)
from praxis_lite.checkpoints.steps.retention import retained_steps
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.checkpoints.steps.verified_steps import VerifiedSteps
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job import processes


class SaveQueue:
    """The save in flight, and how many have failed in a row.

    A save that failed cannot be tried again as it was: its state is gone. The newest state is
    saved in its place, once the trainer hears that it is due; only the last save of a run can wait.

    Args:
      steps: of the directory that is saved to.
      note: told of what fails and is tried again.
      saved: told of each step that is whole, on every process; from another thread.
      name: of all exchanges between the processes, the same on all.
    """

    def __init__(
        self, steps: VerifiedSteps, settings: SaveSettings, note: Callable[[str], None],
        saved: Callable[[int], None], name: str,
    ):
        self._steps, self._settings, self._note, self._name = steps, settings, note, name
        self._saved = saved
        self._numbers = itertools.count()
        self._in_flight: BackgroundSave | None = None
        self._opened: OpenFolder | None = None
        self._num_failed, self._retry_at = 0, float("inf")

    def begin(self, state: TrainState, manifest: dict[str, Any]) -> None:
        """Begins a save; none is in flight."""
        self._retry_at = float("inf")
        save = self._in_flight = BackgroundSave(
            self._steps.directory, manifest, f"{self._name}, save {next(self._numbers)}",
            self._published,
        )
        try:
            save.begin(state)
        finally:
            # Kept open until the next save has begun: a cancelled save may leave writes in
            # TensorStore's threads, which name the folder by the number of an open file.
            self._opened = save.opened

    def end(self, state: TrainState, manifest: dict[str, Any]) -> None:
        """Waits until the save in flight is whole, beginning it again where it failed."""
        while not self.settle():
            time.sleep(self._settings.retry_seconds)
            self.begin(state, manifest)

    def is_saving(self) -> bool:
        """Returns True while a save is in flight; from any thread."""
        save = self._in_flight
        return save is not None and not save.is_done()

    def cancel(self) -> None:
        """Ends the save in flight early, and tells so; one that is over is left to `settle`."""
        save = self._in_flight
        if save is not None and save.cancel():
            self._in_flight = None
            newest = self._steps.newest_in_words()
            self._note(f"The save of step {save.step} was cancelled. {newest}")

    def raise_if_failed(self) -> None:
        """Settles the finished saves."""
        if self._in_flight is not None and self._in_flight.is_done():
            self.settle()

    def retry_is_due(self) -> bool:
        """Returns True if a failed save is to be tried again now."""
        return processes.count() == 1 and time.monotonic() >= self._retry_at

    def settle(self, retries: int | None = None) -> bool:
        """Waits for the save in flight, if any; returns False if it failed.

        Raises:
          FailedSave: more than `retries` in a row have failed; by default those of the settings.
        """
        save = self._in_flight
        if save is None:
            return True
        save.join()  # A second signal may end this: `cancel` then finds the save.
        self._in_flight = None
        if save.error is None:
            self._num_failed = 0
            return True
        self._num_failed += 1
        retries = self._settings.retries if retries is None else retries
        failed = f"The checkpoint of step {save.step} could not be saved: {why(save.error)}"
        if self._num_failed > retries or save.failed_alone:
            raise FailedSave(
                f"{failed}. {self._steps.newest_in_words()} Make room, or fix the cause; the same "
                "command then resumes from there. With run.checkpoints.retries=N a save that "
                "fails is tried again."
            ) from save.error
        self._retry_at = time.monotonic() + self._settings.retry_seconds
        self._note(f"{failed}. It will be tried again, {self._num_failed} of {retries} times")
        return False

    def _published(self, step: int) -> None:
        """Reports a step that is complete; on the first process deletes what is not retained."""
        self._saved(step)
        if not processes.is_first():
            return
        self._steps.forget(step)
        settings, steps = self._settings, self._steps.committed()
        try:
            retained = retained_steps(
                steps, self._steps.metrics(), settings.max_to_keep, settings.keep_every_steps,
                settings.best,
            )
            self._steps.delete(set(steps) - retained)
        except Exception as error:  # The save did not fail: the next one tries this again.
            self._note(f"old checkpoints could not be deleted: {why(error)}")
