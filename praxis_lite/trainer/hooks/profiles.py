"""Profiles steps with JAX's profiler, at the steps that are configured or requested.

Errors of the profiler never end the run.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from praxis_lite.core.errors import shortened
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job import processes
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.hooks.profile_facts import write_facts
from praxis_lite.trainer.job_on_mesh import JobOnMesh

_TOO_LATE = "the requested profile is not recorded: no step is left to profile"


class ProfileBegins(Hook):
    """Starts a profile after the preceding step has been evaluated and saved.

    This is a job's last hook. It profiles the steps in `run.profile.steps` that remain in this
    launch, and steps that are requested while the job runs.
    """

    every = None

    def __init__(self, job: JobOnMesh, profiler: "Profiler"):
        self._run, self._profiler = job.run, profiler
        self._ranges = job.run.profile.ranges()

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop
        self._state: TrainState | None = state

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        state, self._state = self._state, None
        assert state is not None, "Training compiles once."
        if steps := self._configured_after(self._loop.first_step):
            self._profiler.begin(steps, state)

    def is_due(self, step: int, is_last: bool) -> bool:
        num_requested = self._loop.profile_steps
        return bool(num_requested) or (not is_last and self._configured_after(step) is not None)

    def after_step(self, dispatched: DispatchedStep) -> None:
        num_requested, self._loop.profile_steps = self._loop.profile_steps, 0
        if self._profiler.steps:
            self._loop.note("the requested profile is not recorded: another profile is running")
        elif dispatched.is_last:
            self._loop.note(_TOO_LATE)
        else:
            end = min(dispatched.step + num_requested, self._run.num_train_steps) + 1
            # A configured range of steps takes precedence over a request.
            steps = self._configured_after(dispatched.step) or range(dispatched.step + 1, end)
            self._profiler.begin(steps, dispatched.state)

    def after_training(self, step: int) -> None:
        if self._loop.has_profile_request:
            self._loop.note(_TOO_LATE)

    def _configured_after(self, step: int) -> range | None:
        """Returns the configured range that contains `step + 1`, cut to start there, or None."""
        if self._profiler.steps:
            return None
        for steps in self._ranges:
            if step + 1 in steps:
                return range(step + 1, steps.stop)
        return None


class ProfileEnds(Hook):
    """Ends a profile after its last step, before that step is evaluated or saved.

    This is a job's first hook. If the job receives a request to stop, the profile is discarded,
    because the remaining time is needed for the checkpoint.
    """

    every = None

    def __init__(self, profiler: "Profiler"):
        self._profiler = profiler

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop
        if not loop.stop.handles_profile_signal:
            loop.note(
                "note: SIGUSR1 does not request a profile, because training does not run in the "
                "main thread or the program has installed a handler for SIGUSR1; create the file "
                f"{loop.job.files.profile_request} instead"
            )

    def is_due(self, step: int, is_last: bool) -> bool:
        steps = self._profiler.steps
        if not steps or self._loop.stops:
            return False
        return is_last or step == steps[-1]

    def after_step(self, dispatched: DispatchedStep) -> None:
        step = dispatched.step
        with self._loop.watchdog.during(f"writing the profile that ends with step {step}"):
            folder = self._profiler.end(step, dispatched.state)
            if folder is not None:  # In the first process.
                for hook in self._loop.hooks:
                    hook.after_profile(folder)

    def __exit__(self, *exc_info: object) -> None:
        self._profiler.discard()


class Profiler:
    """Writes traces to `profiles/FIRST_STEP` in the job directory, for xprof and TensorBoard.

    Every process calls each method; `run.profile.processes` selects the processes that trace.

    Attributes:
      steps: The steps being profiled, or None. Remains set until the last of these steps even if
        the trace could not be started, so that all processes take the same path.
    """

    def __init__(self, job: JobOnMesh):
        self._job = job
        self._traces = processes.is_first() or job.run.profile.processes == "all"
        self.steps: range | None = None
        self._folder: Path | None = None  # Set while a trace runs.
        self._start = 0.0

    def begin(self, steps: range, state: TrainState) -> None:
        """Starts a trace when the devices have computed `state`, the input to the first step."""
        self.steps = steps
        if not self._traces:
            return
        jax.block_until_ready(state)
        folder = self._job.files.profiles / str(steps.start)
        with self._never_ending_the_run(f"no profile is recorded of {_steps_text(steps)}"):
            if processes.is_first():
                # An earlier launch may have profiled this step, which is now recomputed.
                shutil.rmtree(folder, ignore_errors=True)
            unfinished = _unfinished(folder)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            jax.profiler.start_trace(unfinished, profiler_options=_options())
            self._folder, self._start = folder, time.perf_counter()

    def end(self, step: int, state: TrainState) -> Path | None:
        """Stops the trace and writes the profile's files.

        Args:
          step: The last profiled step.
          state: The state after that step; the trace stops when it has been computed.

        Returns:
          The profile's folder, or None if this is not the first process or a file was not written.
        """
        assert self.steps is not None, "`begin` was called."
        steps, self.steps = range(self.steps.start, step + 1), None
        folder, self._folder = self._folder, None
        if folder is None:
            return None
        jax.block_until_ready(state)
        seconds, is_written = time.perf_counter() - self._start, False
        with self._never_ending_the_run(f"the profile of {_steps_text(steps)} is lost"):
            _stop()
            _move(_unfinished(folder), folder / "plugins/profile" / f"step_{steps.start}")
            is_written = True
        shutil.rmtree(_unfinished(folder), ignore_errors=True)
        if not is_written or not processes.is_first():
            return None
        _log.info("profiled %s: %s", _steps_text(steps), folder)
        with self._never_ending_the_run(f"{folder} contains only the trace"):
            write_facts(self._job, folder, steps, seconds)
            return folder
        return None

    def discard(self) -> None:
        """Stops an unfinished trace and removes its files. Does nothing if there is no trace."""
        folder, self._folder, steps, self.steps = self._folder, None, self.steps, None
        if folder is not None:
            assert steps is not None
            _log.info(
                "the profile that started with step %d is discarded, because training ends before "
                "its last step",
                steps.start,
            )
            with contextlib.suppress(Exception):
                _stop()
            shutil.rmtree(_unfinished(folder), ignore_errors=True)

    @contextlib.contextmanager
    def _never_ending_the_run(self, outcome: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = shortened(" ".join(str(error).split()) or type(error).__name__, 300)
            # In all processes except the first, only log warnings are shown.
            level = logging.INFO if processes.is_first() else logging.WARNING
            _log.log(level, "%s, but training continues: %s", outcome, reason)


def _options() -> Any:
    options = jax.profiler.ProfileOptions()
    # Python calls would fill most of the trace, and recording them slows the steps down.
    options.python_tracer_level = 0
    if hasattr(options, "raise_error_on_start_failure"):
        options.raise_error_on_start_failure = True
    return options


def _stop() -> None:
    try:
        jax.profiler.stop_trace()
    except Exception:
        # After a failed write, JAX still considers the trace to be running and would refuse to
        # start a new trace.
        with contextlib.suppress(Exception):
            jax.profiler.stop_trace()
        raise


def _unfinished(folder: Path) -> Path:
    """Returns the folder into which this process traces, next to the profile's folder.

    The returned folder cannot be inside the profile's folder, because the first process clears the
    profile's folder, possibly after another process has started its trace.
    """
    return folder.with_name(f".process_{processes.index()}")


def _move(unfinished: Path, session: Path) -> None:
    """Moves a trace's files to the profile's folder; their names contain the host and the time."""
    files = [file for file in unfinished.rglob("*") if file.is_file() and file.stat().st_size]
    if not any(file.name.endswith(".xplane.pb") for file in files):
        raise OSError("JAX's profiler wrote no trace; the disk may be full")
    session.mkdir(parents=True, exist_ok=True)
    for file in files:
        for ending in (".xplane.pb", ".trace.json.gz"):
            if file.name.endswith(ending):
                file.replace(session / f"process_{processes.index()}{ending}")


def _steps_text(steps: range) -> str:
    """Returns "step 7" or "steps 7 to 9"."""
    return f"step{f's {steps[0]} to' if len(steps) > 1 else ''} {steps[-1]}"


_log = logging.getLogger(__name__)
