"""Hooks that evaluate a job during training, and that end training early."""

from collections.abc import Mapping

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job.events import EVALUATION, events
from praxis_lite.trainer.evaluation import Evaluator, watched_values
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_history import evaluates, lacks_evaluation, watched_history
from praxis_lite.trainer.job_on_mesh import JobOnMesh


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
            loop.report_evaluation(step, results)


class EarlyStops(Hook):
    """Ends training when a metric has not improved for several evaluations."""

    every, waits = None, False

    def __init__(self, job: JobOnMesh):
        self._job, self._stopping = job, job.run.stopping.early
        self._watched: dict[int, float] = {}

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        # The `MetricsFiles` hook runs earlier and has removed the lines for steps to be recomputed.
        self._watched = watched_history(self._stopping, self._job.files, loop.first_step)

    def after_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> str | None:
        if self._stopping is None:
            return None
        values = watched_values(results)
        self._watched[step] = self._stopping.watched_in(values, step)
        return self._stopping.reason_to_stop(self._watched)
