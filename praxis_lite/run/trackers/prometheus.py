"""Prometheus as a tracker: a text file for the textfile collector of node_exporter."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.core.errors import require
from praxis_lite.files.whole_files import write_whole
from praxis_lite.run.trackers.prometheus_text import PrometheusText
from praxis_lite.run.trackers.tracker import Ending, TrackedRun, Tracker


@dataclasses.dataclass
class PrometheusTextfile(Tracker):
    """Writes the newest numbers of a run into a file, whole each time, at most once a second.

    Raises ConfigError, before anything compiles, if the directory is not there.

    Attributes:
      directory: that of node_exporter's --collector.textfile.directory; the file there is
        praxis_lite_ID.prom. None: the file is JOB/metrics.prom.
      every: as `Tracker.every`.
    """

    newest_alone = True

    directory: str | None = None
    every: int | None = 1

    def check(self) -> None:
        """Raises ConfigError if the directory is not there."""
        require(
            self.directory is None or Path(self.directory).is_dir(),
            "PrometheusTextfile.directory", self.directory, "a directory that is there, or None",
            "Make it, or name another one.",
        )

    def start(self, run: TrackedRun) -> None:
        """Writes the file, which says that the run is running."""
        folder = run.job_log_dir if self.directory is None else Path(self.directory)
        name = "metrics" if self.directory is None else f"praxis_lite_{run.id}"
        self._path, self._text = folder / f"{name}.prom", PrometheusText(run)
        self._write()

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the file with these numbers."""
        self._text.add(step, scalars)
        self._write()

    def end(self, ending: Ending) -> None:
        """Writes that the run no longer runs."""
        self._text.is_running = False
        self._write()

    def _write(self) -> None:
        write_whole(self._path, str(self._text).encode())
