"""The hook that reads a follower's evaluations for early stopping."""

import math
import os
import time

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job.processes.broadcast import from_first
from praxis_lite.trainer.evaluation import evaluation_line
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.hooks.tracking import Trackers
from praxis_lite.trainer.job_history import evaluations
from praxis_lite.trainer.job_on_mesh import JobOnMesh

_POLL_SECONDS = 1.0


class FollowedEvaluations(Hook):
    """Reads evaluations from a follower, a separate process that evaluates new checkpoints.

    The setting run.evaluation.by_follower selects this hook. The first process polls the size of
    the job's evaluation file once a second, and reads the file when the size has changed. All
    processes end training after the same step.
    """

    every, waits = 1, False

    def __init__(self, job: JobOnMesh, trackers: Trackers):
        self._job, self._trackers, self._stopping = job, trackers, job.run.stopping.early
        self._path = job.files.eval_metrics_jsonl
        self._polled_at, self._size, self._has_noted = -math.inf, -1, False

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop
        if self._job.run.evaluation.by_follower and loop.is_first:
            loop.note(
                "a follower must run the evaluations (run.evaluation.by_follower): praxis eval "
                f"{self._job.files.location} --follow"
            )
            self._known = {(step, name) for step, name, _ in evaluations(self._job.files)}

    def is_due(self, step: int, is_last: bool) -> bool:
        return self._job.run.evaluation.by_follower

    def after_step(self, dispatched: DispatchedStep) -> str | None:
        if self._loop.is_first:
            self._poll()
        if not self._loop.consensus.end_is_due:
            return None
        return from_first("the reason for an early end", lambda: self._loop.proposed_end)

    def _poll(self) -> None:
        if time.monotonic() - self._polled_at < _POLL_SECONDS:
            return
        self._polled_at = time.monotonic()
        try:
            size = os.stat(self._path).st_size
        except OSError:  # No follower has written the file yet.
            return
        if size == self._size:
            return
        self._size, values = size, {}
        try:
            results = evaluations(self._job.files)
        except ConfigError as error:
            if not self._has_noted:
                self._loop.note(f"note: the follower's evaluations cannot be read: {error}")
            self._has_noted = True
            return
        for step, dataset, metrics in results:
            if (step, dataset) not in self._known:
                self._known.add((step, dataset))
                self._loop.note(f"follower: {evaluation_line(step, dataset, metrics)}")
                self._trackers.log_evaluation(step, {dataset: metrics})
            for name, value in metrics.items():
                if self._stopping is not None and self._stopping.metric == f"{dataset}/{name}":
                    values[step] = value
        if self._stopping is not None:
            self._loop.proposed_end = self._stopping.reason_to_stop(values)
