"""A run's newest numbers in Prometheus' text format."""

import math
import re
import time
from collections.abc import Mapping

from praxis_lite.run.trackers.tracker import TrackedRun


class PrometheusText:
    """The newest value of each number of a run, as gauges named praxis_lite_NAME.

    Every line has the run's id, name and experiment as labels, and an evaluation's its dataset:
    praxis_lite_evaluation_loss{dataset="heldout", ...}. praxis_lite_updated_seconds is the time of
    the newest number, in Unix seconds, for an alert on a run that hangs.
    """

    def __init__(self, run: TrackedRun):
        self._labels = {"run_id": run.id, "run": run.name, "experiment": run.experiment}
        self._datasets = run.evaluated
        self._values: dict[tuple[str, str], float] = {}
        self.is_running = True

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the numbers of a step."""
        for name, value in scalars.items():
            dataset, slash, metric = name.partition("/")
            if slash and dataset in self._datasets:
                self._values[f"evaluation_{metric}", dataset] = value
                self._values["evaluation_step", dataset] = step
            else:
                self._values[name, ""] = value
                self._values["step", ""] = step
        self._values["updated_seconds", ""] = time.time()

    def __str__(self) -> str:
        lines: dict[str, list[str]] = {}
        written = set()
        values = {("running", ""): float(self.is_running), **self._values}
        for (name, dataset), value in values.items():
            family = f"praxis_lite_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            labels = {**self._labels, **({"dataset": dataset} if dataset else {})}
            if (family, dataset) in written:
                labels["metric"] = name  # Another name reads the same in Prometheus' characters.
            written.add((family, dataset))
            words = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.setdefault(family, [f"# TYPE {family} gauge"]).append(
                f"{family}{{{words}}} {_number(value)}"
            )
        return "".join(f"{line}\n" for family in lines.values() for line in family)


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
