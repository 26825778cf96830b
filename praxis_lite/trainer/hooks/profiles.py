"""The first and the last steps of profiles while a job trains."""

import contextlib
from collections.abc import Iterator

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.trainer.hooks.hook import Hook, StepMade
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.hooks.profiler import Profiler
from praxis_lite.trainer.job_on_mesh import JobOnMesh

_TOO_LATE = "no profile is made of what was asked for: no step is left"


class ProfileBegins(Hook):
    """Begins a profile when the step before its first is made, saved and evaluated.

    The last of a job's hooks. Steps are profiled that `run.profile.steps` names or that were asked
    for while the job runs; of a named range the steps that are still to come.
    """

    every = None

    def __init__(self, job: JobOnMesh, profiler: Profiler):
        self._run, self._profiler = job.run, profiler
        self._ranges = job.run.profile.ranges()

    def before_training(self, loop: Loop, state: TrainState) -> None:
        self._loop, self._state = loop, state

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        state, self._state = self._state, None
        if steps := self._named_after(self._loop.first_step):
            self._profiler.begin(steps, state)

    def is_due(self, step: int, is_last: bool) -> bool:
        asked = self._loop.profile_steps
        return bool(asked) or (not is_last and self._named_after(step) is not None)

    def after_step(self, made: StepMade) -> None:
        asked, self._loop.profile_steps = self._loop.profile_steps, 0
        if self._profiler.steps:
            self._loop.note("no profile is made of what was asked for: another is being made")
        elif made.is_last:
            self._loop.note(_TOO_LATE)
        else:
            end = min(made.step + asked, self._run.num_train_steps) + 1
            steps = self._named_after(made.step) or range(made.step + 1, end)
            self._profiler.begin(steps, made.state)

    def after_training(self, step: int) -> None:
        if self._loop.has_asked:
            self._loop.note(_TOO_LATE)

    def _named_after(self, step: int) -> range | None:
        """Returns the steps that follow this step in the settings' range around it, or None."""
        if self._profiler.steps:
            return None
        for steps in self._ranges:
            if step + 1 in steps:
                return range(step + 1, steps.stop)
        return None


class ProfileEnds(Hook):
    """Ends a profile when its last step is made, before that is evaluated or saved.

    The first of a job's hooks. If the job is asked to end it has little time, and that is for its
    checkpoint: the profile is discarded.
    """

    every = None

    def __init__(self, job: JobOnMesh, profiler: Profiler):
        self._profiler = profiler

    def before_training(self, loop: Loop, state: TrainState) -> None:
        self._loop = loop
        self._profiler.note = loop.note
        if not loop.stop.hears_profiles:
            loop.note(
                "note: SIGUSR1 is not heard, because training is not in the main thread, or the "
                "process has a handler of its own; a file asks for a profile: "
                f"{loop.job.files.profile_request}"
            )

    def is_due(self, step: int, is_last: bool) -> bool:
        is_running = bool(self._profiler.steps) and not self._loop.stops
        return is_running and (is_last or step == self._profiler.steps[-1])

    def after_step(self, made: StepMade) -> None:
        with self._loop.watchdog.during(f"writing the profile that ends with step {made.step}"):
            folder = self._profiler.end(made.step, made.state)
            if folder is not None:
                self._loop.profiled(folder)

    def __exit__(self, *exc_info: object) -> None:
        self._profiler.discard()
