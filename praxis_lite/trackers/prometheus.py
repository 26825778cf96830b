"""The Prometheus tracker, which writes a text file for node_exporter's textfile collector."""

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from praxis_lite.core.errors import require
from praxis_lite.trackers.tracker import Ending, Histogram, TrackedRun, Tracker


class LatestMetrics(Collector):
    """Exports the latest value of each metric of a run as a gauge praxis_lite_NAME.

    Labels are the run's id, name and experiment, and for evaluation metrics also the dataset:
    praxis_lite_evaluation_loss{dataset="heldout", ...}. praxis_lite_updated_seconds is the time of
    the latest value in Unix seconds, for alerts about runs that hang.

    Args:
      run: The description of the run.

    Attributes:
      registry: A prometheus-client registry that contains only these gauges.
      is_running: Whether the run is still running.
    """

    def __init__(self, run: TrackedRun):
        self._labels = {"run_id": run.id, "run": run.name, "experiment": run.experiment}
        self._datasets = run.evaluated
        self._values: dict[tuple[str, str], float] = {}
        self.is_running = True
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Updates the metrics after a step or an evaluation."""
        for name, value in scalars.items():
            dataset, slash, metric = name.partition("/")
            if slash and dataset in self._datasets:
                self._values[f"evaluation_{metric}", dataset] = value
                self._values["evaluation_step", dataset] = step
            else:
                self._values[name, ""] = value
                self._values["step", ""] = step
        self._values["updated_seconds", ""] = time.time()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields a gauge for each metric."""
        families: dict[str, GaugeMetricFamily] = {}
        # Copy the values, because the tracker's thread may add values at the same time.
        values = (("running", ""), float(self.is_running)), *tuple(self._values.items())
        for (name, dataset), value in values:
            name = f"praxis_lite_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            if name not in families:
                families[name] = GaugeMetricFamily(name, f"The latest {name} of a run.")
            labels = {**self._labels, **({"dataset": dataset} if dataset else {})}
            families[name].add_sample(name, labels, value)
        yield from families.values()


@dataclasses.dataclass
class PrometheusTextfile(Tracker):
    """Writes the latest metrics of a run to a file, atomically and at most once a second.

    Attributes:
      directory: An existing directory, which is passed to node_exporter as
        --collector.textfile.directory. The file is praxis_lite_ID.prom in this directory. If None,
        the file is JOB/metrics.prom.
      every: See `Tracker.every`.
    """

    latest_only = True

    directory: str | None = None
    every: int | None = 1

    def check(self) -> None:
        """Raises ConfigError if the directory does not exist."""
        require(
            self.directory is None or Path(self.directory).is_dir(),
            "PrometheusTextfile.directory",
            self.directory,
            "a directory that exists, or None",
            "Create it, or choose a different directory.",
        )

    def start(self, run: TrackedRun) -> None:
        """Writes the file with the gauge praxis_lite_running set to 1."""
        folder = run.job_log_dir if self.directory is None else Path(self.directory)
        name = "metrics" if self.directory is None else f"praxis_lite_{run.id}"
        self._path, self._numbers = folder / f"{name}.prom", LatestMetrics(run)
        self._write()

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the file with the given metrics."""
        self._numbers.add(step, scalars)
        self._write()

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Does nothing, because each statistic of each weight would be a gauge."""

    def end(self, ending: Ending) -> None:
        """Writes the file with the gauge praxis_lite_running set to 0."""
        self._numbers.is_running = False
        self._write()

    def _write(self) -> None:
        write_to_textfile(str(self._path), self._numbers.registry)
