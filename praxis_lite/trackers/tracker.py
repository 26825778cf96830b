"""The base class of trackers, which record the metrics of a run in a service or in files."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from praxis_lite.host.optional_packages import NeedsPackage

_log = logging.getLogger(__name__)

# The ways in which a launch can end: its last step, a signal or a limit, or an exception.
Ending = Literal["finished", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """Description of a run, which is passed to its trackers.

    Attributes:
      id: 32 hex digits, stored in the job directory and the same in all launches of a job.
      name: Name of the job directory.
      experiment: Full name of the experiment's class.
      job_log_dir: The job directory.
      config: The values in the job's config, keyed by path, as in config.txt. Numbers and booleans
        are not converted to text.
      facts: Facts about this launch, keyed by name: mesh, devices, host, versions, number of
        parameters.
      first_step: Number of steps completed before this launch.
      evaluated: Names of the evaluation datasets.
      note: Function that prints a line for the user. Callable from any thread.
    """

    id: str
    name: str
    experiment: str
    job_log_dir: Path
    config: Mapping[str, str | int | float | bool]
    facts: Mapping[str, str]
    first_step: int
    evaluated: tuple[str, ...] = ()
    note: Callable[[str], None] = _log.info


@dataclasses.dataclass(frozen=True)
class Histogram:
    """The distribution of the values of a weight or a gradient.

    Attributes:
      edges: Edges of the bins, evenly spaced from the least to the largest finite value.
      counts: Number of values in each bin, rounded above 2^24.
      mean: Mean of the finite values.
      std: Standard deviation of the finite values.
      num_not_finite: Number of values that are NaN or infinite, which are in no bin.
    """

    edges: np.ndarray
    counts: np.ndarray
    mean: float
    std: float
    num_not_finite: float

    def summary(self) -> dict[str, float]:
        """Returns the range, the mean and the other statistics by name."""
        return {
            "min": float(self.edges[0]),
            "max": float(self.edges[-1]),
            "mean": self.mean,
            "std": self.std,
            "num_not_finite": self.num_not_finite,
        }


class Tracker(NeedsPackage):
    """Base class for trackers, which record the metrics of a run.

    A job's trackers are listed by name in `RunConfig.trackers`. All methods except `check` are
    called on a copy in a separate thread of the first process, so a tracker that fails or hangs
    does not affect training. After an exception in `start`, the tracker is not called again in this
    launch. After an exception in any other method, calls to the tracker continue.

    The constructor should only store settings. Import packages and connect in `start`.

    Attributes:
      every: Interval in steps at which metrics are recorded. If None, it is run.log_every_steps, or
        else an interval that gives about 200 records per run. The last step and all evaluations are
        always recorded.
      latest_only: Whether to send only the latest metrics, at most once a second.
      needed_package: Import name of an optional package that the tracker needs, or None.
    """

    every: int | None = None
    latest_only: bool = False

    def check(self) -> None:
        """Raises ConfigError if a setting or a package is missing, before anything compiles."""
        super().check()

    def start(self, run: TrackedRun) -> None:
        """Starts recording, or continues an earlier launch's run if it has the same `run.id`."""

    def resume_from(self, step: int) -> None:
        """Hides the records for steps after `step`; these steps will be recorded again.

        Called after `start`, and after a rollback from a loss spike. If a tracker does not override
        this method, steps that it has already recorded are not sent to it again.
        """

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records the metrics of a step ("loss") or of an evaluation ("heldout/loss")."""

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Records the distributions of weights and gradients (`run.histograms_every_steps`).

        If a tracker does not override this method, their statistics are recorded as scalars, such
        as "weights/PATH/std".
        """
        self.scalars(
            step,
            {
                f"{name}/{statistic}": value
                for name, histogram in histograms.items()
                for statistic, value in histogram.summary().items()
            },
        )

    def text(self, step: int, name: str, text: str) -> None:
        """Records text."""

    def image(self, step: int, name: str, png: bytes) -> None:
        """Records an image, such as the loss curve at the end of a launch."""

    def end(self, ending: Ending) -> None:
        """Ends recording for this launch. A later launch may continue the run."""
