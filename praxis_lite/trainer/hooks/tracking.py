"""A job's trackers: their threads, and the hook that tells them what was made."""

import contextlib
import json
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
from praxis_lite.host.file_reading import content_of
from praxis_lite.host.whole_files import not_written, write_whole
from praxis_lite.job import processes
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trackers.tracker import Ending, TrackedRun, Tracker
from praxis_lite.trackers.tracker_thread import TrackerThread, numbers_of
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.json_lines import lines_if_any, lost_path
from praxis_lite.trainer.summary import continuations

# The end of a launch waits no longer for its trackers.
END_SECONDS = 30
# Continuations of each dataset that trackers get as a text.
NUM_SAMPLES = 5


class Trackers(contextlib.AbstractContextManager):
    """The trackers of a job, each in a separate thread, which begins with training.

    Leaving the context ends them, and waits for at most END_SECONDS.
    """

    def __init__(
        self, threads: Sequence[TrackerThread], files: JobDir, note: Callable[[str], None]
    ):
        self._threads, self._files, self._note = threads, files, note
        self._ending: Ending = "finished"

    def go_on_from(self, step: int) -> None:
        """Announces that training begins after this step: at a start, and after a roll-back.

        The lines of later steps were moved to the files of lost lines, which tell how far training
        was before.
        """
        if self._threads:
            steps = _newest_lost(self._files.metrics_jsonl, self._note)
            evaluations = _newest_lost(self._files.eval_metrics_jsonl, self._note)
        for thread in self._threads:
            thread.go_on_from(step, steps, evaluations)
            if thread.ident is None:
                thread.start()

    def made(self, step: int, line: Mapping[str, Any]) -> None:
        """Gives the trackers the numbers of a step."""
        if any(thread.is_due(step) for thread in self._threads):
            numbers = numbers_of(line)
            for thread in self._threads:
                thread.made(step, numbers)

    def evaluated(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Gives the trackers the metrics of an evaluation, by dataset."""
        for thread in self._threads:
            thread.evaluated(step, results)

    def ends(self, first_step: int, step: int, *, stopped: bool) -> None:
        """Announces that the launch trained from `first_step` to `step`.

        The trackers get its loss curve, and samples of what was decoded since `first_step`.
        """
        self._ending = "stopped" if stopped else "finished"
        if not self._threads:
            return
        try:
            for dataset, decoded, text in continuations(self._files, NUM_SAMPLES):
                if decoded >= first_step:
                    for thread in self._threads:
                        thread.text(decoded, f"decode/{dataset}", text)
        except ConfigError as error:
            self._note(f"note: trackers get no decoded samples: {error}")
        with contextlib.suppress(OSError):  # There is none, as a note said.
            png = content_of(self._files.loss_curve_png)
            for thread in self._threads:
                thread.image(step, "loss_curve", png)

    def say(self, note: Callable[[str], None]) -> None:
        """Passes on the notes of the trackers."""
        for thread in self._threads:
            while thread.notes:
                note(thread.notes.popleft())

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        ends_at = time.monotonic() + END_SECONDS
        begun = [thread for thread in self._threads if thread.ident is not None]
        for thread in begun:
            thread.end(self._ending if kind is None else "failed")
        for thread in begun:
            thread.join(max(0.0, ends_at - time.monotonic()))
        self.say(self._note)
        for thread in begun:
            if thread.is_alive():
                self._note(f"note: the {thread.name} was not done after {END_SECONDS} s, and is "
                           "left; it may lack the newest numbers")


def _newest_lost(path: Path, note: Callable[[str], None]) -> int:
    """Returns the newest step among the lost lines of a file; 0 if there are none."""
    try:
        return max((line["step"] for line in lines_if_any(lost_path(path))), default=0)
    except ConfigError as error:
        note(f"note: trackers may get steps a second time: {error}")
        return 0


class Tracking(Hook):
    """Gives the trackers what was made; comes after the hook that writes the files of metrics."""

    every, waits = None, False

    def __init__(self, trackers: Trackers):
        self._trackers = trackers

    def before_training(self, loop: Loop, state: TrainState) -> None:
        self._note = loop.note
        self._trackers.go_on_from(loop.first_step)

    def after_metrics(self, metrics: StepMetrics) -> None:
        self._trackers.made(metrics.step, metrics.line)
        self._trackers.say(self._note)

    def after_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        self._trackers.evaluated(step, results)


def trackers_of(
    job: JobOnMesh, launched: LaunchedConfig, first_step: int, note: Callable[[str], None]
) -> Trackers:
    """Returns the trackers of a job; none of a process that is not the first.

    Args:
      first_step: the number of steps that were made before.
      note: prints a line.
    """
    trackers = {name: item for name, item in job.run.trackers.items() if item is not None}
    threads = []
    if trackers and processes.is_first():
        try:
            run = tracked_run(job, launched, first_step, note)
            threads = [
                TrackerThread(name, tracker, run, _due_steps(job, tracker))
                for name, tracker in trackers.items()
            ]
        except ConfigError as error:
            note(f"note: the run has no trackers: {error}")
    return Trackers(threads, job.files, note)


def tracked_run(
    job: JobOnMesh, launched: LaunchedConfig, first_step: int, note: Callable[[str], None]
) -> TrackedRun:
    """Returns a run as its trackers see it; raises ConfigError if its id cannot be written."""
    mesh, leaves = job.partitioner.mesh, job.partitioner.layout.leaves()
    sizes = (math.prod(leaf.shape) for leaf in leaves if leaf.path.startswith("mdl_vars/"))
    facts = {
        "job_log_dir": str(job.files.path),
        "host": socket.gethostname(),
        "processes": str(processes.count()),
        "mesh": ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
        "devices": f"{mesh.size} {mesh.devices.flat[0].device_kind}",
        "parameters": f"{sum(sizes):,}",
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    return TrackedRun(
        id=run_id(job.files.trackers), name=job.files.path.name,
        experiment=launched.experiment, job_log_dir=job.files.path,
        config=config_values(launched.config), facts=facts, first_step=first_step,
        evaluated=tuple(job.eval_sets), note=note,
    )


def run_id(folder: Path) -> str:
    """Returns the id in `folder`/run_id.json, which the first launch makes.

    Raises ConfigError if the file cannot be read or written.
    """
    path = folder / "run_id.json"
    try:
        if path.exists():
            return str(json.loads(path.read_text())["id"])
        folder.mkdir(exist_ok=True)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} has no run id ({error}). Remove it: trackers then begin a new run."
        ) from None
    except OSError as error:
        raise not_written(path, error) from error
    new = uuid.uuid4().hex
    write_whole(path, f'{{"id": "{new}"}}\n'.encode())
    return new


def _due_steps(job: JobOnMesh, tracker: Tracker) -> Callable[[int], bool]:
    last = job.run.num_train_steps
    every = tracker.every or job.run.log_every_steps or max(1, last // 200)
    return lambda step: step % every == 0 or step == last
