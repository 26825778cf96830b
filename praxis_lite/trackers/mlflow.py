"""The MLflow tracker, for a server or a database such as sqlite:////path/mlflow.db."""

import dataclasses
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.host.optional_packages import optional_module
from praxis_lite.trackers.tracker import Ending, TrackedRun, Tracker

# The tag by which later launches find the run, because MLflow assigns the run ids.
RUN_ID_TAG = "praxis_lite.run_id"
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# MLflow's limits: characters per key, characters per param, and params and metrics per request.
_KEY, _PARAM, _PARAMS, _METRICS = 250, 6000, 100, 1000


@dataclasses.dataclass
class MLflow(Tracker):
    """Records all launches of a job as a single run in MLflow.

    If a setting changes between launches, its param keeps the first value, because MLflow's params
    are immutable. The new value is stored in the tag "changed.PATH".

    Attributes:
      tracking_uri: A server "https://..." or a database "sqlite:////path/mlflow.db". If None,
        MLFLOW_TRACKING_URI, or else MLflow's default.
      experiment: Name of the MLflow experiment. If None, the name of the job's experiment.
      every: See `Tracker.every`.
    """

    needed_package = "mlflow"

    tracking_uri: str | None = None
    experiment: str | None = None
    every: int | None = None

    def start(self, run: TrackedRun) -> None:
        """Starts the run, or continues the run of an earlier launch."""
        self._entities = optional_module("mlflow.entities", "MLflow")
        self._client = client = optional_module("mlflow", "MLflow").MlflowClient(self.tracking_uri)
        name = self.experiment or run.experiment
        known = client.get_experiment_by_name(name)
        experiment_id = (
            known.experiment_id
            if known
            else client.create_experiment(
                name, artifact_location=_artifact_location(self.tracking_uri)
            )
        )
        runs = client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{run.id}'")
        if runs:
            self._id, before = runs[0].info.run_id, runs[0].data.params
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {RUN_ID_TAG: run.id}
            self._id = client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id
            before = {}
        texts = {_key(path): str(value)[:_PARAM] for path, value in run.config.items()}
        changed = {
            _key(f"changed.{path}"): text
            for path, text in texts.items()
            if before.get(path, text) != text
        }
        for path, text in {**run.facts, **changed}.items():
            client.set_tag(self._id, path, text)
        new = [self._entities.Param(path, x) for path, x in texts.items() if path not in before]
        # Log only new params, in requests of at most _PARAMS.
        for start in range(0, len(new), _PARAMS):
            client.log_batch(self._id, params=new[start : start + _PARAMS])

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records numbers at a step."""
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_key(name), value, now, step) for name, value in scalars.items()
        ]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS])

    def text(self, step: int, name: str, text: str) -> None:
        """Stores a text as an artifact."""
        self._client.log_text(self._id, text, f"{name}/{step}.txt")

    def image(self, step: int, name: str, png: bytes) -> None:
        """Stores an image as an artifact."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{step}.png")
            path.write_bytes(png)
            self._client.log_artifact(self._id, str(path), name)

    def end(self, ending: Ending) -> None:
        """Sets the final status of the run."""
        self._client.set_terminated(self._id, _STATES[ending])


def _artifact_location(tracking_uri: str | None) -> str | None:
    """Returns the artifact folder next to a database file, or None for MLflow's default.

    For a database, MLflow's default is a folder in the current directory.
    """
    scheme, is_file, path = (tracking_uri or "").partition(":///")
    if scheme != "sqlite" or not is_file:
        return None
    return (Path(path).absolute().parent / "mlartifacts").as_uri()


def _key(name: str) -> str:
    """Converts a name to a key with characters and a length that MLflow accepts."""
    return re.sub(r"[^\w/.: -]", "_", name, flags=re.ASCII)[:_KEY]
