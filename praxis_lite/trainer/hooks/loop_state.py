"""The state of the training loop that hooks read and change."""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.job.events import COMPILE, events
from praxis_lite.job.processes.stop_consensus import StopConsensus
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.job.processes.watchdog import Watchdog
from praxis_lite.trainer.compilation import compile_step
from praxis_lite.trainer.hooks.hook import Hook
from praxis_lite.trainer.hooks.profile_requests import ProfileRequests
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.spike_detector import LossSpike

__all__ = ("LoopState",)

Results = Mapping[str, Mapping[str, float]]


class LoopState:
    """The state of the training loop that is visible to hooks.

    The TrainState is never stored here, because it is donated to the next step.

    Attributes:
      job: The job, placed on its mesh, with its datasets, settings and files.
      first_step: Number of steps completed before this launch, or before the roll-back.
      is_resumed: Whether an earlier launch of this job saved the state of `first_step`.
      skipped_batches: Indices of training batches that are skipped after loss spikes.
      note: Logs a line; a terminal shows it above the progress line.
      is_first: Whether this process writes the job's files.
      checkpoints: The job's checkpoints.
      stop: The requests to stop this process.
      watchdog: Reports steps that take too long.
      consensus: Makes all processes stop, save and profile at the same step.
      hooks: All hooks, in the order in which they are called.
      stops: Whether any process has received a request to stop; the same in all processes.
      reason: The reason why a hook has ended training, or None.
      proposed_end: The first process's reason for ending training, to which the other processes
        have not yet agreed, or None.
      results: Metrics from the newest step's evaluation, keyed by dataset, or None if the step
        was not evaluated.
      spike: The loss spike to roll back from, or None.
      saved_at: Value of `time.monotonic()` at the start of the newest save.
      profile_steps: Number of steps in a requested profile that has not started, or 0 if there is
        no request; the same in all processes.
      has_profile_request: Whether this process received a request for a profile to which the other
        processes have not yet agreed.
    """

    def __init__(
        self,
        job: JobOnMesh,
        first_step: int,
        skipped_batches: Sequence[int],
        checkpoints: Checkpoints,
        stop: StopRequest,
        hooks: Sequence[Hook],
        *,
        is_resumed: bool,
    ):
        stopping = job.run.stopping
        self.job, self.first_step, self.skipped_batches = job, first_step, tuple(skipped_batches)
        self.checkpoints, self.stop, self.hooks = checkpoints, stop, tuple(hooks)
        self.note = _log.info
        self.is_resumed = is_resumed
        self.is_first = processes.is_first()
        self.consensus = StopConsensus(job.partitioner.mesh)
        self.watchdog = Watchdog(
            stopping.watchdog_seconds,
            exits=stopping.watchdog_exits,
            is_saving=checkpoints.is_saving,
            stacks_txt=job.files.stacks_txt,
        )
        self.stops = False
        self.reason: str | None = None
        self.proposed_end: str | None = None
        self.spike: LossSpike | None = None
        self.results: Results | None = None
        self.saved_at = time.monotonic()
        self.profile_steps, self.has_profile_request = 0, False
        self._requests = ProfileRequests(job.files.profile_request, stop)

    def compile(self) -> float:
        """Compiles the training step in the contexts of all hooks; returns the seconds taken."""
        start, train = time.perf_counter(), self.job.datasets[TRAIN]
        with contextlib.ExitStack() as stack:
            stack.enter_context(events.phase(COMPILE))
            for hook in self.hooks:
                stack.enter_context(hook.compiling())
            compile_step(self.job.partitioner.train_step, train, f"datasets.{TRAIN}")
        return time.perf_counter() - start

    def should_stop(self) -> bool:
        """Updates and returns `stops`, and resets the watchdog's timer.

        This is a collective operation: all processes call it after each step and after each batch
        of an evaluation.
        """
        self.watchdog.alive()
        seconds = self.job.run.checkpoints.seconds_between
        is_save_due = seconds is not None and time.monotonic() - self.saved_at >= seconds
        num_requested = self._requests.take()
        self.has_profile_request |= bool(num_requested)
        # The processes exchange their requests, and receive those of the previous call.
        self.stops |= self.consensus.should_stop(
            self.stop.reason is not None,
            is_save_due,
            num_requested,
            self.proposed_end is not None,
        )
        if self.consensus.profile_steps:
            self.profile_steps, self.has_profile_request = self.consensus.profile_steps, False
        return self.stops

    def end(self, reason: str | None) -> None:
        """Ends training with the current step unless `reason` is None; keeps the first reason."""
        self.reason = self.reason or reason

    def is_last(self, step: int) -> bool:
        """Returns whether training is currently expected to end with this step."""
        ends = self.stops or self.reason is not None
        return ends or step >= self.job.run.num_train_steps

    def stopped_by(self) -> str | None:
        """Returns the request that stopped training, such as "SIGTERM", or None."""
        return (self.stop.reason or self.consensus.stop_reason) if self.stops else None


_log = logging.getLogger(__name__)
