"""Hooks for training on a cluster: health files, and the grace period after SIGTERM."""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from praxis_lite.job.health_files import HealthBeat
from praxis_lite.job.processes.logs import warn_once_per_job
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook, StepMetrics

if TYPE_CHECKING:
    from praxis_lite.core.partitioner.train_state import TrainState
    from praxis_lite.trainer.hooks.loop_state import LoopState


class Health(Hook):
    """Creates `ready` after a launch's first step, and stops updating `alive` if training hangs.

    Args:
      beat: The context manager that updates the health files of this launch.
    """

    waits = False

    def __init__(self, beat: HealthBeat):
        self._beat = beat

    def before_training(self, loop: "LoopState", state: "TrainState") -> None:
        self._beat.is_hung = loop.watchdog.is_silent

    def after_metrics(self, metrics: StepMetrics) -> None:
        self._beat.files.ready(True)

    def __exit__(self, *exc_info: object) -> None:
        self._beat.files.ready(False)
        self._beat.is_hung = lambda: False


class Grace(Hook):
    """Warns once if stopping after SIGTERM may take longer than the cluster waits.

    The time to stop consists of the current step, another step in which all processes agree to
    stop, the wait for a save in progress, and the last save. The durations of the longest step and
    the longest save are stored in the checkpoints, so that a resumed job can warn before its first
    step.

    Args:
      seconds: Seconds for which the cluster waits between SIGTERM and SIGKILL.
    """

    waits = False

    def __init__(self, seconds: int):
        self._seconds, self._has_warned = seconds, False
        self._step = self._save = 0.0
        self._measured_save: float | None = None  # Start time of the last save that was measured.

    def restore(self, saved: Mapping[str, float] | None) -> None:
        if saved is not None:
            self._step, self._save = saved["step_seconds"], saved["save_seconds"]

    def to_save(self) -> dict[str, float]:
        return {"step_seconds": self._step, "save_seconds": self._save}

    def before_training(self, loop: "LoopState", state: "TrainState") -> None:
        self._loop = loop
        self._warn()

    def after_metrics(self, metrics: StepMetrics) -> None:
        self._step = max(self._step, metrics.line["step_time"])

    def after_step(self, dispatched: DispatchedStep) -> None:
        loop = self._loop
        if self._measured_save is None:
            self._measured_save = loop.saved_at
        if self._measured_save != loop.saved_at and not loop.checkpoints.is_saving():
            self._measured_save = loop.saved_at
            self._save = max(self._save, time.monotonic() - loop.saved_at)
            self._warn()

    def _warn(self) -> None:
        needed = math.ceil(2 * (self._step + self._save))
        if needed <= self._seconds or not self._save or self._has_warned:
            return
        self._has_warned = True
        warn_once_per_job(
            f"this job may need {needed} s to stop after SIGTERM (two steps of "
            f"{self._step:.1f} s and two saves of {self._save:.1f} s), but the cluster kills it "
            f"after --grace_seconds={self._seconds}, so the last save would be lost. Increase the "
            "cluster's grace period (docs/clusters.md)."
        )
