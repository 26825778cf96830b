"""A tracker of a run: a service, or files of another program, that shows its numbers."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from praxis_lite.host.optional_packages import NeedsPackage

# How a launch ended: at its last step, by a signal or a limit, or by an exception.
Ending = Literal["finished", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers see it.

    Attributes:
      id: 32 hex digits that are the same for all launches of a job; a file in its directory.
      name: of the job's directory.
      experiment: the full name of the experiment's class.
      job_log_dir: the job's directory.
      config: Of the complete job, by path, as in `config.txt`; numbers and booleans as such.
      facts: About this launch, by name: mesh, devices, host, versions, number of parameters.
      first_step: The number of steps that were made before.
      evaluated: The names of the datasets that the job evaluates on.
      note: Prints a line for the user; may be called from any thread.
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
    """A service, or files of another program, that shows the numbers of a run. Subclass it.

    A job has its trackers by name in `RunConfig.trackers`. Each works on a copy, in a separate
    thread, so a tracker that fails or hangs neither ends nor slows the run. After an exception in
    `start` the tracker gets no more calls in this launch; after one in another method the later
    calls are made all the same.

    All calls come from that thread, in the first of several processes. The constructor only stores
    settings; `start` imports and connects.

    Attributes:
      every: Steps between the steps whose numbers it gets. None: run.log_every_steps, or about 200
        steps in a run. It always gets the last step and all evaluations.
      newest_alone: True: it gets only the newest numbers, at most once a second.
      needed_package: The import name of an optional package that it needs; `check` requires it.
    """

    every: int | None = None
    newest_alone: bool = False

    def check(self) -> None:
        """Raises ConfigError if a setting or a package is missing, before anything compiles."""
        super().check()

    def start(self, run: TrackedRun) -> None:
        """Begins a launch of a run, or continues that of an earlier launch: see `run.id`."""

    def go_on_from(self, step: int) -> None:
        """Hides the records of later steps, which are recomputed and recorded again.

        Called after `start`, and when a run returns to a step before a loss spike. A tracker that
        does not override this method does not get the steps of an earlier launch again.
        """

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records the numbers of a step, "loss", or of an evaluation: "heldout/loss"."""

    def text(self, step: int, name: str, text: str) -> None:
        """Records a text."""

    def image(self, step: int, name: str, png: bytes) -> None:
        """Records a picture, such as the loss curve at the end of a launch."""

    def end(self, ending: Ending) -> None:
        """Ends a launch; the next launch may continue the same run."""
