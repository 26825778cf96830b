"""Hooks that start and end profiles at the right steps."""

import contextlib
from collections.abc import Iterator

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.hooks.profiler import Profiler
from praxis_lite.trainer.job_on_mesh import JobOnMesh

_TOO_LATE = "the requested profile is not recorded: no step is left to profile"


class ProfileBegins(Hook):
    """Starts a profile after the preceding step has been evaluated and saved.

    This is a job's last hook. It profiles the steps in `run.profile.steps` that remain in this
    launch, and steps that are requested while the job runs.
    """

    every = None

    def __init__(self, job: JobOnMesh, profiler: Profiler):
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

    def __init__(self, job: JobOnMesh, profiler: Profiler):
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
            if folder is not None:
                self._loop.report_profile(folder)

    def __exit__(self, *exc_info: object) -> None:
        self._profiler.discard()
