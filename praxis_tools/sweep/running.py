"""Runs the trials of a sweep as local processes, prunes them and records their results."""

import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.job.processes import signals
from praxis_lite.job.processes.logs import write_now
from praxis_tools.sweep.claims import Claims
from praxis_tools.sweep.stored_sweep import StoredClaims
from praxis_tools.sweep.study import OpenTrial, Study
from praxis_tools.sweep.trial_job import TrialJob

_POLL_SECONDS, _PROGRESS_SECONDS = 0.2, 15.0
# Time limit for trials from a killed sweep to exit.
_REMAINING_SECONDS = 60.0
_PRINT_PLATFORM = (
    "from praxis_lite.core.sharding.mesh import attached_devices; print(attached_devices()[1])"
)


class _EndRequest(signals.SignalListener):
    """Records a signal that ends all trials gracefully; a second signal ends them immediately.

    Attributes:
      reason: Name of the signal, or None if there was no signal.
    """

    reason: str | None = None

    def _on_signal(self, signum: int) -> None:
        if self.reason is None:
            self.reason = signals.name(signum)
            write_now(
                f"{self.reason}: ending all trials after they have saved their steps. Send the "
                "signal again to end immediately."
            )


class RunningTrial:
    """A trial with its running process."""

    def __init__(self, trial: OpenTrial, job: TrialJob):
        self.trial, self.job, self.process = trial, job, job.start(job.command())
        self._reported_steps: set[int] = set()
        self._pruned_at: int | None = None

    def prune_if_bad(self) -> None:
        """Reports the trial's new values to the study, and ends the process if the trial is pruned.

        Values are reported in order and even after the process has exited, so that pruning does not
        depend on when the files are read.
        """
        for step, value in self.job.values():
            if self._pruned_at is not None or not math.isfinite(value):
                return
            if step not in self._reported_steps:
                self._reported_steps.add(step)
                if self.trial.should_prune(step, value):
                    self._pruned_at = step
                    self.end()

    def end(self) -> None:
        """Asks the process to save and exit."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def record(self) -> str:
        """Records how the trial ended and returns a description."""
        self.job.upload_output()
        self.job.refresh()
        self.prune_if_bad()
        if self._pruned_at is not None:
            self.trial.pruned(self._pruned_at)
            return f"pruned at step {self._pruned_at}"
        return record_result(self.trial, self.job, self.process.returncode)


def record_result(trial: OpenTrial, job: TrialJob, status: int) -> str:
    """Records the result of a job with the given exit status and returns a description."""
    try:
        values = job.read_values()
        lacks_metric = "" if values else job.lacks_metric()
    except ConfigError as error:
        return trial.failed("failed", str(error))
    # A job checks its settings, data and memory before its first step.
    if status == 2 and not job.has_stepped():
        return trial.failed("refused", job.last_error())
    # A job that was stopped by a signal exits with status 0, but is not complete.
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
    study: Study,
    claims: Claims | StoredClaims,
    job_of: Callable[[OpenTrial], TrialJob],
    parallel: int,
    topology: str | None,
    note: Callable[[str], None],
) -> str | None:
    """Runs all trials that have no result and are not claimed by other workers.

    Args:
      study: The trials of the sweep.
      claims: The claims of this process.
      job_of: Function that returns the job of a trial.
      parallel: Maximum number of trials that run at the same time.
      topology: Topology for which trials are planned before they start; see `is_refused_by_plan`.
      note: Function called with each line of progress.

    Returns:
      The name of the signal that ended the sweep early, or None.

    Raises:
      ConfigError: Another process is training a trial, or a trial cannot be planned.
    """
    running = list[RunningTrial]()
    printed_at = time.monotonic()
    request = _EndRequest()
    with request, _ending_all(running):
        while request.reason is None:
            while request.reason is None and len(running) < parallel:
                trial = _take(study, claims)
                if trial is None:
                    break
                if is_refused_by_plan(trial, job_of(trial), topology, note):
                    claims.release(trial.number)
                else:
                    running.append(_start(trial, job_of(trial), request, note))
            if not running:
                break
            for ended in [trial for trial in running if trial.process.poll() is not None]:
                running.remove(ended)
                note(f"trial {ended.trial.number}: {ended.record()}")
                claims.release(ended.trial.number)
            for still_running in running:
                still_running.prune_if_bad()
            if time.monotonic() - printed_at > _PROGRESS_SECONDS:
                printed_at = time.monotonic()
                note(_progress(study, running))
            time.sleep(_POLL_SECONDS)
    return request.reason


def _take(study: Study, claims: Claims | StoredClaims) -> OpenTrial | None:
    """Claims a trial whose sweep or worker ended before the trial, or else the next trial to start.

    Returns None if there are no such trials.
    """
    with claims.exclusive():
        for unfinished in study.unfinished():
            if claims.claim(unfinished.number):
                return unfinished
        trial = study.next()
        if trial is not None:
            claims.claim(trial.number)
        return trial


@contextlib.contextmanager
def _ending_all(running: list[RunningTrial]) -> Iterator[None]:
    """Context manager that, on exit, asks the running trials to save and waits for them to exit."""
    try:
        yield
    finally:
        for trial in running:
            trial.end()
        for trial in running:
            trial.process.wait()
            trial.job.upload_output()


def is_refused_by_plan(
    trial: OpenTrial, job: TrialJob, topology: str | None, note: Callable[[str], None]
) -> bool:
    """Returns whether a trial that has not started is too large for the topology.

    Such a trial is recorded as refused.

    Args:
      trial: The trial to plan.
      job: The trial's job.
      topology: Value of --topology. If None, the trial is not planned.
      note: Function called with the reason if the trial is refused.

    Raises:
      ConfigError: The topology does not exist, or the compiler for it is not installed.
    """
    if topology is None or job.has_stepped():
        return False
    process = job.start(job.plan_command(topology))
    try:
        status = process.wait()
    finally:
        process.terminate()
        job.upload_output()
    if status == 0:
        return False
    reason = job.last_error()
    if status != 2 or reason.startswith("--topology"):
        raise ConfigError(f"Planning trial {trial.number} failed with status {status}: {reason}")
    note(f"trial {trial.number}: {trial.failed('refused', reason)}")
    return True


def _start(
    trial: OpenTrial, job: TrialJob, request: _EndRequest, note: Callable[[str], None]
) -> RunningTrial:
    """Starts or resumes a trial, after waiting for any other process that is running it."""
    deadline = time.monotonic() + _REMAINING_SECONDS
    if job.is_training():
        note(f"trial {trial.number}: waiting until the process that is running it has exited")
    while job.is_training() and request.reason is None:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{job.files.location}: another process is running this trial. Wait until that "
                "process has exited, or stop it with `kill PID`; it saves a checkpoint first. The "
                "PID is in the file .training."
            )
        time.sleep(_POLL_SECONDS)
    values = " ".join(f"{path}={text}" for path, text in trial.values.items())
    note(f"trial {trial.number} {'resumes' if job.has_stepped() else 'starts'}: {values}")
    return RunningTrial(trial, job)


def _progress(study: Study, running: list[RunningTrial]) -> str:
    progress = []
    for trial in running:
        values = trial.job.values()
        latest = f" {values[-1][1]:.4g} at step {values[-1][0]}" if values else " no value yet"
        progress.append(f"trial {trial.trial.number}:{latest}")
    num_ended = sum(record.status not in ("runs", "waits") for record in study.records())
    best = study.best()
    best_so_far = f"; best: {best.value:.6g}, trial {best.number}" if best else ""
    count = f"{num_ended} of {study.settings.num_trials} trials have ended"
    return f"{count}{best_so_far}; {', '.join(progress)}"


def check_parallel(parallel: int) -> None:
    """Checks that this machine can run several trials at the same time.

    This is not possible on a machine with accelerators, because every process reserves all of them.
    Therefore, the platform of the devices is looked up in a subprocess.

    Raises:
      ConfigError: `parallel` is below 1, or is above 1 on a machine with accelerators.
    """
    require(parallel >= 1, "--parallel", parallel, "a number of trials, 1 or more")
    if parallel == 1:
        return
    process = subprocess.run(
        [sys.executable, "-c", _PRINT_PLATFORM], capture_output=True, text=True, check=False
    )
    platform = process.stdout.strip()
    if platform != "cpu":
        raise ConfigError(
            f"--parallel is {parallel}, but expected 1 on the platform {platform!r}, because every "
            "process reserves all accelerators of a machine. Remove --parallel, or submit the "
            "commands from --print to a scheduler."
        )
