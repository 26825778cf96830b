"""The base class of trackers, which record the metrics of a run in a service or in files."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from praxis_lite.host.optional_packages import NeedsPackage

# How a launch ended: at its last step, by a signal or a limit, or by an exception.
Ending = Literal["finished", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """Description of a run, which is passed to its trackers.

    Attributes:
      id: 32 hex digits, the same for all launches of a job; stored in the job's directory.
      name: Name of the job's directory.
      experiment: Full name of the experiment's class.
      job_log_dir: The job's directory.
      config: The values of the job's config by path, as in config.txt; numbers and booleans are not
        converted to text.
      facts: Facts about this launch by name: mesh, devices, host, versions, number of parameters.
      first_step: Number of steps completed before this launch.
      evaluated: Names of the evaluation datasets.
      note: Prints a line for the user; callable from any thread.
    """

    id: str
    name: str
    experiment: str
    job_log_dir: Path
    config: Mapping[str, str | int | float | bool]
    facts: Mapping[str, str]
    first_step: int
    evaluated: tuple[str, ...] = ()
    note: Callable[[str], None] = print


class Tracker(NeedsPackage):
    """Base class of trackers, which record the metrics of a run. Subclass it.

    The trackers of a job are in `RunConfig.trackers`, by name. All methods but `check` are called
    on a copy, in a separate thread of the first process, so a tracker that fails or hangs neither
    ends nor slows the run. After an exception in `start`, the tracker gets no more calls in this
    launch; after an exception in another method, calls continue.

    The constructor should only store settings; import packages and connect in `start`.

    Attributes:
      every: Steps between the steps whose metrics the tracker gets; None for run.log_every_steps,
        or else about 200 steps per run. The last step and all evaluations are always included.
      newest_alone: Whether the tracker gets only the newest metrics, at most once a second.
      needed_package: Import name of an optional package that the tracker needs, or None.
    """

    every: int | None = None
    newest_alone: bool = False

    def check(self) -> None:
        """Raises ConfigError if a setting or a package is missing, before anything compiles."""
        super().check()

    def start(self, run: TrackedRun) -> None:
        """Starts recording; continues the run of an earlier launch if it has the same `run.id`."""

    def go_on_from(self, step: int) -> None:
        """Hides the records of steps after `step`, which will be recorded again.

        Called after `start`, and after a roll-back from a loss spike. A tracker that does not
        override this method does not get recomputed steps a second time.
        """

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records the metrics of a step ("loss") or of an evaluation ("heldout/loss")."""

    def text(self, step: int, name: str, text: str) -> None:
        """Records a text."""

    def image(self, step: int, name: str, png: bytes) -> None:
        """Records an image, such as the loss curve at the end of a launch."""

    def end(self, ending: Ending) -> None:
        """Ends the recording of a launch; a later launch may continue the run."""
