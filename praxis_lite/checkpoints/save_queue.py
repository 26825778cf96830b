"""Runs a job's saves one at a time, and handles saves that fail."""

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from praxis_lite.checkpoints.background_save import BackgroundSave, OpenFolder, why
from praxis_lite.checkpoints.steps.retention import retained_steps
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.checkpoints.steps.verified_steps import VerifiedSteps
from praxis_lite.core.errors import FailedSave
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job import processes


class SaveQueue:
    """The save in progress, and the number of consecutive failures.

    A failed save cannot be retried with the same state, because training has overwritten it.
    Instead, the trainer saves the newest state when `retry_is_due`. Only the last save of a run is
    retried with the same state.

    Args:
      steps: The steps in the directory.
      settings: Settings for retries and for the steps to retain.
      note: Called with a message after a failure that will be retried.
      saved: Called with each saved step, in every process, from a different thread.
      before_commit: See `BackgroundSave`. Called from a different thread.
      name: Name prefix for exchanges between processes, the same in all processes.
    """

    def __init__(
        self,
        steps: VerifiedSteps,
        settings: SaveSettings,
        note: Callable[[str], None],
        saved: Callable[[int], None],
        before_commit: Callable[[], None],
        name: str,
    ):
        self._steps, self._settings, self._note, self._name = steps, settings, note, name
        self._saved, self._before_commit = saved, before_commit
        self._numbers = itertools.count()
        self._in_flight: BackgroundSave | None = None
        self._opened: OpenFolder | None = None
        self._num_failed, self._retry_at = 0, float("inf")

    def begin(self, state: TrainState, manifest: dict[str, Any]) -> None:
        """Starts a save. No other save may be in progress."""
        self._retry_at = float("inf")
        save = self._in_flight = BackgroundSave(
            self._steps.store,
            manifest,
            f"{self._name}, save {next(self._numbers)}",
            self._before_commit,
            self._published,
        )
        try:
            save.begin(state)
        finally:
            # Keep the folder open until the next save has started, because TensorStore's threads
            # may still write files of a cancelled save through this descriptor.
            self._opened = save.opened

    def end(self, state: TrainState, manifest: dict[str, Any]) -> None:
        """Waits until the save in progress is complete, and retries it if it fails."""
        while not self.settle():
            time.sleep(self._settings.retry_seconds)
            self.begin(state, manifest)

    def is_saving(self) -> bool:
        """Returns whether a save is in progress. Callable from any thread."""
        save = self._in_flight
        return save is not None and not save.is_done()

    def cancel(self) -> None:
        """Cancels the save in progress and logs a warning. Does nothing if the save has ended."""
        save = self._in_flight
        if save is not None and save.cancel():
            self._in_flight = None
            # Not a note, because this may happen in only one of the processes.
            newest = self._steps.describe_newest()
            _log.warning("The save of step %d was cancelled. %s", save.step, newest)

    def raise_if_failed(self) -> None:
        """Calls `settle` if the save in progress has ended."""
        if self._in_flight is not None and self._in_flight.is_done():
            self.settle()

    def retry_is_due(self) -> bool:
        """Returns whether to retry a failed save now, with the newest state."""
        return processes.count() == 1 and time.monotonic() >= self._retry_at

    def settle(self, retries: int | None = None) -> bool:
        """Waits for the save in progress, if any.

        Args:
          retries: Number of consecutive failures to allow. If None, the number in the settings is
            used.

        Returns:
          False if the save failed, else True.

        Raises:
          FailedSave: More than `retries` consecutive saves have failed.
        """
        save = self._in_flight
        if save is None:
            return True
        # A second signal may interrupt this. In that case, `cancel` must still find the save.
        save.join()
        self._in_flight = None
        if save.error is None:
            self._num_failed = 0
            return True
        self._num_failed += 1
        retries = self._settings.retries if retries is None else retries
        failed = f"The checkpoint of step {save.step} could not be saved: {why(save.error)}"
        if self._num_failed > retries or save.failed_alone:
            raise FailedSave(
                f"{failed}. {self._steps.describe_newest()} Free disk space or fix the cause; the "
                "same command then resumes from that checkpoint. Set run.checkpoints.retries=N to "
                "retry failed saves."
            ) from save.error
        self._retry_at = time.monotonic() + self._settings.retry_seconds
        self._note(f"{failed}. Retrying, {self._num_failed} of {retries} times")
        return False

    def _published(self, step: int) -> None:
        """Reports a saved step. In the first process, also deletes steps that are not retained."""
        self._saved(step)
        if not processes.is_first():
            return
        self._steps.forget(step)
        settings, steps = self._settings, self._steps.committed()
        try:
            retained = retained_steps(
                steps,
                self._steps.metrics(),
                settings.max_to_keep,
                settings.keep_every_steps,
                settings.best,
            )
            self._steps.delete(set(steps) - retained)
        except Exception as error:  # The save itself succeeded; retry after the next save.
            self._note(f"old checkpoints could not be deleted: {why(error)}")


_log = logging.getLogger(__name__)
