"""The training loop as its hooks see it."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.job.events import COMPILE, events
from praxis_lite.job.processes.stop_consensus import StopConsensus
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.job.processes.watchdog import Watchdog
from praxis_lite.trainer.compilation import compile_step
from praxis_lite.trainer.hooks.hook import Hook, overrides
from praxis_lite.trainer.hooks.profile_requests import ProfileRequests
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.spike_detector import LossSpike

__all__ = ("Loop",)

Results = Mapping[str, Mapping[str, float]]


class Loop:
    """A job that trains: its parts, and why it ends, as far as known. It never holds a state.

    Attributes:
      job: the task on its mesh, the data, `run` and the files of the job's directory.
      first_step: the number of steps that were made before.
      is_resumed: True if the job itself saved the state of that step.
      skipped_batches: indices of training batches that are left out, after loss spikes.
      note: prints a line, above the line of progress.
      is_first: True in the process that writes the job's files.
      checkpoints, stop, watchdog, consensus: of the job.
      hooks: all of them, in their order.
      stops: True once a process was asked to stop, on all processes alike.
      reason: why a hook ends training, or None.
      proposed_end: why the first process would end training, until all have heard of it, or None.
      results: of the evaluation of the newest step, by dataset; None if it was not evaluated.
      spike: the loss spike for which the run is rolled back, or None.
      saved_at: when the newest checkpoint was begun, in seconds of time.monotonic.
      profile_steps: number of steps of a profile that was requested and has not begun; 0: none
        was. The same on all processes.
      has_asked: this process has requested a profile, and the others have not answered yet.
    """

    def __init__(
        self, job: JobOnMesh, first_step: int, skipped_batches: Sequence[int],
        checkpoints: Checkpoints, stop: StopRequest, hooks: Sequence[Hook],
        note: Callable[[str], None], *, is_resumed: bool,
    ):
        stopping = job.run.stopping
        self.job, self.first_step, self.skipped_batches = job, first_step, tuple(skipped_batches)
        self.checkpoints, self.stop, self.hooks, self.note = checkpoints, stop, tuple(hooks), note
        self.is_resumed = is_resumed
        self.is_first = processes.is_first()
        self.consensus = StopConsensus(job.partitioner.mesh)
        self.watchdog = Watchdog(
            stopping.watchdog_seconds, exits=stopping.watchdog_exits,
            is_saving=checkpoints.is_saving, stacks_txt=job.files.stacks_txt,
        )
        self.stops, self.reason = False, None
        self.proposed_end: str | None = None
        self.spike: LossSpike | None = None
        self.results: Results | None = None
        self.saved_at = time.monotonic()
        self.profile_steps, self.has_asked = 0, False
        self._requests = ProfileRequests(job.files.profile_request, stop, note)
        self._told = [hook for hook in hooks if overrides(hook, "after_evaluation")]

    def compile(self) -> float:
        """Compiles the training step, in the context of all hooks; returns the seconds it took."""
        began, train = time.perf_counter(), self.job.datasets[TRAIN]
        with contextlib.ExitStack() as held:
            held.enter_context(events.phase(COMPILE))
            for hook in self.hooks:
                held.enter_context(hook.compiling())
            compile_step(self.job.partitioner.train_step, train, f"datasets.{TRAIN}")
        return time.perf_counter() - began

    def asked_to_stop(self) -> bool:
        """Returns `stops`, having asked all processes; a sign of life for the watchdog."""
        self.watchdog.alive()
        seconds = self.job.run.checkpoints.seconds_between
        is_due = seconds is not None and time.monotonic() - self.saved_at >= seconds
        asked = self._requests.taken()
        self.has_asked |= bool(asked)
        self.stops |= self.consensus.reached(
            self.stop.reason is not None, is_due, asked,
            self.proposed_end is not None,
        )
        if self.consensus.profile_steps:
            self.profile_steps, self.has_asked = self.consensus.profile_steps, False
        return self.stops

    def evaluated(self, step: int, results: Results) -> None:
        """Tells all hooks the results of an evaluation."""
        self.results = results
        for hook in self._told:
            self.end(hook.after_evaluation(step, results))

    def profiled(self, folder: Path) -> None:
        """Tells all hooks, in the first process, that the files of a profile are written."""
        for hook in self.hooks:
            hook.after_profile(folder)

    def end(self, reason: str | None) -> None:
        """Ends training with this step, if there is a reason; the first reason is reported."""
        self.reason = self.reason or reason

    def is_last(self, step: int) -> bool:
        """Returns True if training ends with this step, as far as is known."""
        ends = self.stops or self.reason is not None
        return ends or step >= self.job.run.num_train_steps

    def stopped_by(self) -> str | None:
        """Returns the reason of an early end, such as "SIGTERM", or None."""
        return (self.stop.reason or self.consensus.wanted_by) if self.stops else None
