"""MLflow as a tracker: a server, or a database of its own such as sqlite:////path/mlflow.db."""

import dataclasses
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.core.errors import few
from praxis_lite.host.optional_packages import optional_module, require_package
from praxis_lite.run.trackers.tracker import Ending, TrackedRun, Tracker

# The tag by which the next launch finds its run: MLflow chooses the ids of runs itself.
RUN_ID_TAG = "praxis_lite.run_id"
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# MLflow's own limits: characters of a key, a param and a tag; params, and metrics, in one request.
_KEY, _PARAM, _TAG, _PARAMS, _METRICS = 250, 6000, 8000, 100, 1000


@dataclasses.dataclass
class MLflow(Tracker):
    """Records a job in MLflow, all its launches as a single run.

    A setting that changed between two launches keeps its first value as a param, for MLflow's
    params never change; the new one is the tag "changed.PATH".

    Attributes:
      tracking_uri: a server, "https://...", or a database, "sqlite:////path/mlflow.db". None: as
        MLFLOW_TRACKING_URI says, or else MLflow's default.
      experiment: MLflow's name for runs that belong together. None: that of the experiment.
      every: as `Tracker.every`.
    """

    tracking_uri: str | None = None
    experiment: str | None = None
    every: int | None = None

    def check(self) -> None:
        """Raises ConfigError if MLflow is not installed."""
        require_package("mlflow", "MLflow")

    def start(self, run: TrackedRun) -> None:
        """Begins the run, or goes on with it."""
        self._entities = optional_module("mlflow.entities", "MLflow")
        client = optional_module("mlflow", "MLflow").MlflowClient(self.tracking_uri)
        name = self.experiment or run.experiment
        known = client.get_experiment_by_name(name)
        experiment_id = known.experiment_id if known else client.create_experiment(
            name, artifact_location=_artifact_location(self.tracking_uri)
        )
        runs = client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{run.id}'")
        if runs:
            self._id, before = runs[0].info.run_id, runs[0].data.params
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {RUN_ID_TAG: run.id}
            self._id = client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id
            before = {}
        self._client = client
        # Steps by key of a run that was there, as they are asked for; None: the run is new. A kill
        # may come between a record and the note that it was made.
        self._recorded: dict[str, set[int]] | None = {} if runs else None
        self._settings(run, before)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records numbers at a step, but for those that the run has there."""
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_key(name), value, now, step) for name, value in scalars.items()
            if step not in self._recorded_steps(_key(name))
        ]
        for at in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + _METRICS])

    def text(self, step: int, name: str, text: str) -> None:
        """Stores a text as an artifact."""
        self._client.log_text(self._id, text, f"{name}/{step}.txt")

    def image(self, step: int, name: str, png: bytes) -> None:
        """Stores a picture as an artifact."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{step}.png")
            path.write_bytes(png)
            self._client.log_artifact(self._id, str(path), name)

    def end(self, ending: Ending) -> None:
        """Ends the launch."""
        self._client.set_terminated(self._id, _STATES[ending])

    def _recorded_steps(self, key: str) -> set[int]:
        """Returns the steps of a metric that the run had when this launch went on with it."""
        if self._recorded is None:
            return set()
        if key not in self._recorded:
            history = self._client.get_metric_history(self._id, key)
            self._recorded[key] = {point.step for point in history}
        return self._recorded[key]

    def _settings(self, run: TrackedRun, before: Mapping[str, str]) -> None:
        """Records the config as params, and facts and changed settings as tags."""
        texts = {_key(path): str(value) for path, value in run.config.items()}
        if cut := [path for path, text in texts.items() if len(text) > _PARAM]:
            run.note(
                f"note: MLflow's params have at most {_PARAM} characters: {few(cut)} "
                f"{'is' if len(cut) == 1 else 'are'} cut there; config.txt has all"
            )
        texts = {path: text[:_PARAM] for path, text in texts.items()}
        tags = {name: value[:_TAG] for name, value in run.facts.items()}
        tags |= {
            _key(f"changed.{path}"): text for path, text in texts.items()
            if path in before and before[path] != text
        }
        for name, value in tags.items():
            self._client.set_tag(self._id, name, value)
        params = [
            self._entities.Param(path, text) for path, text in texts.items() if path not in before
        ]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _PARAMS])


def _artifact_location(tracking_uri: str | None) -> str | None:
    """Returns the folder of texts and pictures beside a database; None: as MLflow decides.

    MLflow itself would take a folder of the current directory.
    """
    scheme, is_file, path = (tracking_uri or "").partition(":///")
    if scheme != "sqlite" or not is_file:
        return None
    return (Path(path).absolute().parent / "mlartifacts").as_uri()


def _key(name: str) -> str:
    """Returns a name in the characters that MLflow takes, and no longer than it takes."""
    return re.sub(r"[^\w/.: -]", "_", name, flags=re.ASCII)[:_KEY]
