"""TensorBoard as a tracker: curves, the config, and hyperparameters beside the run's losses."""

import dataclasses
from collections.abc import Mapping

from praxis_lite.run.trackers.event_files import TensorBoardWriter
from praxis_lite.run.trackers.tracker import Ending, TrackedRun, Tracker


@dataclasses.dataclass
class TensorBoard(Tracker):
    """Writes summaries into JOB/tensorboard, for `tensorboard --logdir=JOB/tensorboard`.

    Without tensorboardX (extra "plots") a note says so, and nothing is written.

    Attributes:
      every: as `Tracker.every`.
    """

    every: int | None = None

    def start(self, run: TrackedRun) -> None:
        """Begins an event file; raises ConfigError if tensorboardX is missing."""
        if hasattr(self, "_writer"):  # It failed, and is tried again.
            self._writer.close()
        self._writer = TensorBoardWriter(run.job_log_dir / "tensorboard")
        for title, values in (("config", run.config), ("facts", run.facts)):
            rows = "".join(f"    {name}={value}\n" for name, value in values.items())
            self._writer.text(run.first_step, title, rows)
        losses = ["loss", *(f"{dataset}/loss" for dataset in run.evaluated)]
        self._writer.hparams(run.config, dict.fromkeys(losses))

    def go_on_from(self, step: int) -> None:
        """Hides what earlier files have of later steps."""
        self._writer.go_on_from(step)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes a point per number."""
        self._writer.scalars(step, scalars)

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text, shown as it is."""
        self._writer.text(step, name, "".join(f"    {line}\n" for line in text.splitlines()))

    def image(self, step: int, name: str, png: bytes) -> None:
        """Writes a picture."""
        self._writer.image(step, name, png)

    def end(self, ending: Ending) -> None:
        """Closes the file."""
        self._writer.close()
