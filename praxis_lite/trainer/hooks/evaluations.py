"""Hooks that evaluate a job during training, read a follower's evaluations, and end training."""

import math
import os
import time
from collections.abc import Mapping

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.experiment.run_settings import EarlyStopping
from praxis_lite.job.events import EVALUATION, events
from praxis_lite.job.processes.broadcast import from_first
from praxis_lite.trainer.evaluation import Evaluator, evaluation_line, watched_values
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.hooks.tracking import Trackers
from praxis_lite.trainer.job_history import (
    evaluates,
    evaluations,
    lacks_evaluation,
    watched_history,
)
from praxis_lite.trainer.job_on_mesh import JobOnMesh

_POLL_SECONDS = 1.0


class Evaluations(Hook):
    """Evaluates all datasets except `train` at regular steps and at the end.

    If the previous launch was stopped during an evaluation, the evaluation is repeated before the
    first step.
    """

    def __init__(self, job: JobOnMesh):
        self._job, self.every = job, job.run.evaluation.every_steps

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        job, step = self._job, loop.first_step
        self._loop = loop
        self._evaluator = Evaluator(
            job.partitioner,
            job.eval_sets,
            job.run.evaluation.max_batches,
            seed=job.run.seed,
        )
        if loop.is_resumed:
            is_missing = lacks_evaluation(job.run, job.eval_sets, job.files, step)
        else:
            is_missing = job.run.evaluation.at_start and bool(job.eval_sets)
        if is_missing:
            self._evaluate(step, state)

    def is_due(self, step: int, is_last: bool) -> bool:
        is_due = evaluates(self._job.run, step)
        return bool(self._job.eval_sets) and is_due and not self._loop.stops

    def after_step(self, dispatched: DispatchedStep) -> None:
        self._evaluate(dispatched.step, dispatched.state)

    def _evaluate(self, step: int, state: TrainState) -> None:
        """Evaluates a state and passes the results to the hooks, unless the job is stopping."""
        loop, run = self._loop, self._job.run
        with (
            loop.watchdog.during(f"evaluating step {step}"),
            events.phase(EVALUATION),
        ):
            # Do not assign the weights to a local variable: averaged weights are a second copy,
            # which must be freed after the evaluation.
            results = self._evaluator.run(
                step,
                self._job.partitioner.eval_mdl_vars(state, use_ema=run.evaluation.use_ema_states),
                loop.should_stop,
            )
        if results is not None:
            loop.results = results
            for hook in loop.hooks:
                loop.end(hook.after_evaluation(step, results))


class EarlyStops(Hook):
    """Ends training when a metric has not improved for several evaluations."""

    every, waits = None, False

    def __init__(self, job: JobOnMesh, stopping: EarlyStopping):
        self._job, self._stopping = job, stopping

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        # The `MetricsFiles` hook runs earlier and has removed the lines for steps to be recomputed.
        self._watched = watched_history(self._stopping, self._job.files, loop.first_step)

    def after_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> str | None:
        values = watched_values(results)
        self._watched[step] = self._stopping.watched_in(values, step)
        return self._stopping.reason_to_stop(self._watched)


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
        if loop.is_first:
            loop.note(
                "a follower must run the evaluations (run.evaluation.by_follower): praxis eval "
                f"{self._job.files.location} --follow"
            )
            self._known = {(step, name) for step, name, _ in evaluations(self._job.files)}

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
