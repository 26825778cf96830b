"""Runs the trials of a sweep as processes of this machine, prunes them and records results."""

import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.job.processes import signals
from praxis_tools.sweep.study import OpenTrial, Study
from praxis_tools.sweep.trial_job import TrialJob

_POLL_SECONDS, _PROGRESS_SECONDS = 0.2, 15.0
# How long the trials of a killed sweep may take to end.
_LEFT_SECONDS = 60.0
_PLATFORM = (
    "from praxis_lite.core.sharding.mesh import attached_devices; print(attached_devices()[1])"
)


class _EndRequest(signals.SignalListener):
    """Listens for the signal that ends all trials softly; a second one ends them at once.

    Attributes:
      reason: the signal's name, or None.
    """

    reason: str | None = None

    def _on_signal(self, signum: int) -> None:
        if self.reason is None:
            self.reason = signals.name(signum)
            signals.write_line(
                f"{self.reason}: ending the trials, which save their steps; a second signal ends "
                "at once"
            )


class RunningTrial:
    """A trial and its process."""

    def __init__(self, trial: OpenTrial, job: TrialJob):
        self.trial, self.job, self.process = trial, job, job.start(job.command())
        self._judged: set[int] = set()
        self._pruned_at: int | None = None

    def judge(self) -> None:
        """Reports the trial's new values to the study, and ends the process if it is pruned.

        Values are judged in their order, also those that came since the process ended: whether a
        trial is pruned, and where, does not depend on when the files are read.
        """
        for step, value in self.job.values():
            if self._pruned_at is not None or not math.isfinite(value):
                return
            if step not in self._judged:
                self._judged.add(step)
                if self.trial.should_prune(step, value):
                    self._pruned_at = step
                    self.end()

    def end(self) -> None:
        """Asks the process to save and to end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def record(self) -> str:
        """Records how the trial ended; returns it as text."""
        self.judge()
        if self._pruned_at is not None:
            self.trial.pruned(self._pruned_at)
            return f"pruned at step {self._pruned_at}"
        return record_result(self.trial, self.job, self.process.returncode)


def record_result(trial: OpenTrial, job: TrialJob, status: int) -> str:
    """Records the result of a job that ended with this exit status; returns it as text."""
    try:
        values = job.read_values()
        lacks_metric = "" if values else job.lacks_metric()
    except ConfigError as error:
        return trial.failed("failed", str(error))
    # A job checks its settings, its data and its memory before its first step.
    if status == 2 and not job.has_stepped():
        return trial.failed("refused", job.last_error())
    # A job that was stopped from outside ends with status 0, and is not complete.
    if status or job.last_error().startswith("stopped by "):
        return trial.failed("failed", f"status {status}: {job.last_error()}")
    if not values:
        return trial.failed("failed", lacks_metric)
    step, value = values[-1]
    if not math.isfinite(value):
        return trial.failed("failed", f"{job.metric} is {value} at step {step}")
    trial.completed(step, value)
    return f"{job.metric} {value:.6g} at step {step}"


def run_trials(
    study: Study, job_of: Callable[[OpenTrial], TrialJob], parallel: int,
    topology: str | None, note: Callable[[str], None],
) -> str | None:
    """Runs the trials without a result; returns the signal that ended the sweep early, or None.

    Args:
      job_of: returns the job of a trial.
      parallel: how many run at a time.
      topology: as of `is_refused_by_plan`.

    Raises:
      ConfigError: a trial is trained by another process; or as `is_refused_by_plan`.
    """
    waiting, running = study.begun(), list[RunningTrial]()
    printed_at = time.monotonic()
    with _EndRequest() as request, _ending_all(running):
        while request.reason is None:
            while request.reason is None and len(running) < parallel:
                trial = waiting.pop(0) if waiting else study.next()
                if trial is None:
                    break
                if not is_refused_by_plan(trial, job_of(trial), topology, note):
                    running.append(_begun(trial, job_of(trial), request, note))
            if not running:
                break
            for item in [item for item in running if item.process.poll() is not None]:
                running.remove(item)
                note(f"trial {item.trial.number}: {item.record()}")
            for item in running:
                item.judge()
            if time.monotonic() - printed_at > _PROGRESS_SECONDS:
                printed_at = time.monotonic()
                note(_progress(study, running))
            time.sleep(_POLL_SECONDS)
    return request.reason


@contextlib.contextmanager
def _ending_all(running: list[RunningTrial]) -> Iterator[None]:
    """On exit, asks the running trials to save and to end, and waits for them."""
    try:
        yield
    finally:
        for item in running:
            item.end()
        for item in running:
            item.process.wait()


def is_refused_by_plan(
    trial: OpenTrial, job: TrialJob, topology: str | None, note: Callable[[str], None]
) -> bool:
    """Plans a trial without steps; records that it is refused if it does not fit.

    Args:
      topology: the devices, as for --topology; None: nothing is planned.

    Raises:
      ConfigError: there is no such topology, or its compiler is not installed.
    """
    if topology is None or job.has_stepped():
        return False
    process = job.start(job.plan_command(topology))
    try:
        status = process.wait()
    finally:
        process.terminate()
    if status == 0:
        return False
    reason = job.last_error()
    if status != 2 or reason.startswith("--topology"):
        raise ConfigError(f"The plan of trial {trial.number} ended with status {status}: {reason}")
    note(f"trial {trial.number}: {trial.failed('refused', reason)}")
    return True


def _begun(
    trial: OpenTrial, job: TrialJob, request: _EndRequest, note: Callable[[str], None]
) -> RunningTrial:
    deadline = time.monotonic() + _LEFT_SECONDS
    if job.is_training():
        note(f"trial {trial.number}: waiting for the process that trains it to end")
    while job.is_training() and request.reason is None:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{job.files.path}: another process trains this trial. Wait for its end, or end it "
                "(kill PID saves its step; .training there names it)."
            )
        time.sleep(_POLL_SECONDS)
    values = " ".join(f"{path}={text}" for path, text in trial.values.items())
    note(f"trial {trial.number} {'goes on' if job.has_stepped() else 'begins'}: {values}")
    return RunningTrial(trial, job)


def _progress(study: Study, running: list[RunningTrial]) -> str:
    progress = []
    for item in running:
        values = item.job.values()
        known = f" {values[-1][1]:.4g} at step {values[-1][0]}" if values else " no value yet"
        progress.append(f"trial {item.trial.number}:{known}")
    records = study.records()
    ended = sum(record.status not in ("runs", "waits") for record in records)
    best = study.best()
    so_far = f"; the best: {best.value:.6g}, trial {best.number}" if best else ""
    count = f"{ended} of {study.settings.num_trials} trials have ended"
    return f"{count}{so_far}; {', '.join(progress)}"


def check_parallel(parallel: int) -> None:
    """Checks that several trials can share this machine: a process takes all accelerators.

    Another process looks for devices, because it may take them.

    Raises:
      ConfigError: the number is below 1, or there are accelerators.
    """
    require(parallel >= 1, "--parallel", parallel, "a number of trials, 1 or more")
    if parallel == 1:
        return
    asked = subprocess.run(
        [sys.executable, "-c", _PLATFORM], capture_output=True, text=True, check=False
    )
    platform = asked.stdout.strip()
    require(
        platform == "cpu", "--parallel", parallel, f"1 on devices of the platform {platform!r}",
        "A process holds all accelerators of a machine: run the trials one after the other, or "
        "give the lines of --print to a scheduler.",
    )
