"""A job's trackers, such as TensorBoard, and the hook that sends metrics to trackers."""

import contextlib
import json
import logging
import math
import platform
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from praxis_lite.config.config_json import config_values
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.host.atomic_files import not_written, write_atomically
from praxis_lite.host.file_reading import content_of
from praxis_lite.job import processes
from praxis_lite.job.job_dir import SAMPLES, JobDir
from praxis_lite.trackers.tracker import Ending, Histogram, TrackedRun, Tracker
from praxis_lite.trackers.tracker_thread import TrackerThread, numbers_of
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.json_lines import lost_path, read_json_lines
from praxis_lite.trainer.summary import continuations

# Maximum time to wait for the trackers at the end of a launch.
END_SECONDS = 30
# Number of decoded samples per dataset to send to trackers.
NUM_SAMPLES = 5


class Trackers(contextlib.AbstractContextManager):
    """A job's trackers, each of which runs in a separate thread.

    The threads start when training starts. Exiting the context stops the threads and waits at most
    END_SECONDS.
    """

    def __init__(self, threads: Sequence[TrackerThread], files: JobDir):
        self._threads, self._files = threads, files
        self._ending: Ending = "finished"

    def resume_from(self, step: int) -> None:
        """Notifies the trackers that training resumes after `step`, in a new launch or a roll-back.

        The lines for later steps have been moved to the files of lost lines. The newest recorded
        step is read from these files.
        """
        if self._threads:
            newest_step = _newest_lost(self._files.metrics_jsonl)
            newest_evaluation = _newest_lost(self._files.eval_metrics_jsonl)
        for thread in self._threads:
            thread.resume_from(step, newest_step, newest_evaluation)
            if thread.ident is None:
                thread.start()

    def log_step(self, step: int, line: Mapping[str, Any]) -> None:
        """Sends a step's metrics to the trackers."""
        if any(thread.is_due(step) for thread in self._threads):
            numbers = numbers_of(line)
            for thread in self._threads:
                thread.log_step(step, numbers)

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Sends an evaluation's metrics, keyed by dataset, to the trackers."""
        for thread in self._threads:
            thread.log_evaluation(step, results)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Sends histograms of weights and gradients to the trackers."""
        for thread in self._threads:
            thread.log_histograms(step, histograms)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Sends a text that belongs to a step to the trackers."""
        for thread in self._threads:
            thread.log_text(step, name, text)

    def finish(self, first_step: int, step: int, *, stopped: bool) -> None:
        """Sends the loss curve, and samples decoded since `first_step`, to the trackers.

        Args:
          first_step: The step at which the launch started.
          step: The last step of the launch.
          stopped: Whether the launch was stopped before the end of training.
        """
        self._ending = "stopped" if stopped else "finished"
        if not self._threads:
            return
        try:
            for dataset, decoded_step, text in continuations(self._files, NUM_SAMPLES):
                # The hook `Samples` has already sent its texts.
                if decoded_step >= first_step and dataset != SAMPLES:
                    for thread in self._threads:
                        thread.text(decoded_step, f"decode/{dataset}", text)
        except ConfigError as error:
            _log.info("note: no decoded samples are sent to trackers: %s", error)
        # If there is no image, `draw_loss_curve` has already reported the reason.
        with contextlib.suppress(OSError):
            png = content_of(self._files.loss_curve_png)
            for thread in self._threads:
                thread.image(step, "loss_curve", png)

    def log_notes(self) -> None:
        """Logs the queued notes from all trackers."""
        for thread in self._threads:
            while thread.notes:
                _log.info(thread.notes.popleft())

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        deadline = time.monotonic() + END_SECONDS
        started = [thread for thread in self._threads if thread.ident is not None]
        # End all threads before waiting, so that they finish at the same time.
        for thread in started:
            thread.end(self._ending if kind is None else "failed")
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.log_notes()
        for thread in started:
            if thread.is_alive():
                _log.info(
                    "note: the %s did not finish within %s s; the newest numbers may be missing",
                    thread.name,
                    END_SECONDS,
                )


def _newest_lost(path: Path) -> int:
    """Returns the newest step among the lost lines from a file, or 0 if there are none."""
    try:
        return max((line["step"] for line in read_json_lines(lost_path(path))), default=0)
    except ConfigError as error:
        _log.info("note: trackers may get some steps twice: %s", error)
        return 0


class Tracking(Hook):
    """Sends metrics to the trackers; runs after the hook that writes the metrics files."""

    every, waits = None, False

    def __init__(self, trackers: Trackers):
        self._trackers = trackers

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._trackers.resume_from(loop.first_step)

    def after_metrics(self, metrics: StepMetrics) -> None:
        self._trackers.log_step(metrics.step, metrics.line)
        self._trackers.log_notes()

    def after_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        self._trackers.log_evaluation(step, results)


def open_trackers(job: JobOnMesh, launched: LaunchedConfig, first_step: int) -> Trackers:
    """Returns a job's trackers. Only the first process has trackers.

    Args:
      job: The job, placed on its mesh.
      launched: The config of the launch.
      first_step: Number of steps completed before this launch.
    """
    trackers = {name: tracker for name, tracker in job.run.trackers.items() if tracker is not None}
    threads = []
    if trackers and processes.is_first():
        try:
            run = tracked_run(job, launched, first_step)
            threads = [
                TrackerThread(name, tracker, run, _due_steps(job, tracker))
                for name, tracker in trackers.items()
            ]
        except ConfigError as error:
            _log.info("note: the trackers cannot be started: %s", error)
    return Trackers(threads, job.files)


def tracked_run(job: JobOnMesh, launched: LaunchedConfig, first_step: int) -> TrackedRun:
    """Describes a run for its trackers; raises ConfigError if the run's id cannot be written."""
    mesh, leaves = job.partitioner.mesh, job.partitioner.layout.leaves()
    sizes = (math.prod(leaf.shape) for leaf in leaves if leaf.path.startswith("mdl_vars/"))
    facts = {
        "job_log_dir": str(job.files.location),
        "host": socket.gethostname(),
        "processes": str(processes.count()),
        "mesh": ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
        "devices": f"{mesh.size} {mesh.devices.flat[0].device_kind}",
        "parameters": f"{sum(sizes):,}",
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    return TrackedRun(
        id=run_id(job.files.trackers),
        name=job.files.path.name,
        experiment=launched.experiment,
        job_log_dir=job.files.path,
        config=config_values(launched.config),
        facts=facts,
        first_step=first_step,
        evaluated=tuple(job.eval_sets),
    )


def run_id(folder: Path) -> str:
    """Returns the id from run_id.json in a folder; the first launch creates this file.

    Raises:
      ConfigError: The file cannot be read or written.
    """
    path = folder / "run_id.json"
    try:
        if path.exists():
            return str(json.loads(path.read_text())["id"])
        folder.mkdir(exist_ok=True)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} contains no run id ({error}). Remove the file to let trackers start a new run."
        ) from None
    except OSError as error:
        raise not_written(path, error) from error
    new = uuid.uuid4().hex
    write_atomically(path, f'{{"id": "{new}"}}\n'.encode())
    return new


def _due_steps(job: JobOnMesh, tracker: Tracker) -> Callable[[int], bool]:
    last_step = job.run.num_train_steps
    every = tracker.every or job.run.log_every_steps or max(1, last_step // 200)
    return lambda step: step % every == 0 or step == last_step


_log = logging.getLogger(__name__)
