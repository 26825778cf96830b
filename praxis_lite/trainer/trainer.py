"""The training loop: when a step runs, when it is saved, evaluated and reported."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.errors import ConfigError
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.explain.compiler_warnings import explained_warnings
from praxis_lite.inputs import InputPipeline
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.batches import check_ids
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job import processes
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.agreement import Agreement
from praxis_lite.job.processes.stopping import StopRequest
from praxis_lite.job.processes.watchdog import SAVING, Watchdog
from praxis_lite.partitioner import Partitioner, TrainState
from praxis_lite.trainer.evaluation import Evaluator, evaluation_line, watched_values
from praxis_lite.trainer.job_history import is_due, lacks_evaluation, losses_before, watched_history
from praxis_lite.trainer.loss_spikes import SpikeDetector
from praxis_lite.trainer.metrics import (
    JsonLinesWriter,
    ProgressLine,
    TensorBoardWriter,
    plot_loss_curve,
)
from praxis_lite.trainer.non_finite.steps import NonFiniteSteps
from praxis_lite.trainer.step_reports import PendingStep, StepReports


@dataclasses.dataclass(frozen=True)
class Trained:
    """How training ended.

    Attributes:
      step: the last one made; its checkpoint is saved.
      num_skipped: steps in a row, up to the last, that were skipped.
      stopped_by: what asked for an early end, such as "SIGTERM"; None: nothing did.
    """

    step: int
    num_skipped: int
    stopped_by: str | None = None


def train(
    partitioner: Partitioner,
    datasets: Mapping[str, InputPipeline],
    run: RunConfig,
    job: JobDir,
    checkpoints: Checkpoints,
    state: TrainState,
    first_step: int,
    progress: ProgressLine,
    stop: StopRequest,
    skipped_batches: Sequence[int] = (),
) -> Trained:
    """Trains to `run.num_train_steps`, or until it stops early or is asked to.

    Step N's line is in metrics.jsonl before the checkpoint of step N is begun. Metrics are read
    one step late, while the next step runs, so the devices never wait for the host.

    Args:
      state: of `first_step`; donated.
      first_step: the steps made; the data goes on from there.
      stop: asked after every step, and before every batch of an evaluation.
      skipped_batches: indices of training batches that are left out.

    Raises:
      ConfigError: a batch has ids that the model has no row for; or
        `run.max_skipped_steps_in_a_row` steps were skipped: names the newest checkpoint before.
      LossSpike: where run.on_loss_spike is "roll_back".
      FailedSave: a checkpoint could not be written.
    """
    position = DataPosition.of_step(first_step, tuple(skipped_batches))
    loop = _Loop(partitioner, datasets, run, job, checkpoints, progress, stop, first_step, position)
    try:
        with loop.watchdog:
            trained = loop.run(state, first_step)
    finally:
        loop.close()
    draw_loss_curve(job, trained.step, progress.note)
    return trained


def draw_loss_curve(job: JobDir, step: int, note: Callable[[str], None]) -> None:
    """Draws the job's losses, to its last step; a picture that cannot be written is noted."""
    if not processes.is_first():
        return
    title = f"{job.path.name}, {step} steps"
    try:
        plot_loss_curve(job.metrics_jsonl, job.loss_curve_png, job.eval_metrics_jsonl, title)
    except ConfigError as error:
        note(f"note: {error}")


class _Loop:
    """The loop with all it writes to, asks and is watched by."""

    def __init__(
        self,
        partitioner: Partitioner,
        datasets: Mapping[str, InputPipeline],
        run: RunConfig,
        job: JobDir,
        checkpoints: Checkpoints,
        progress: ProgressLine,
        stop: StopRequest,
        first_step: int,
        position: DataPosition,
    ):
        self.partitioner, self.run_config, self.job = partitioner, run, job
        self.checkpoints, self.progress, self.stop = checkpoints, progress, stop
        self.pipeline, self.position = datasets[TRAIN], position
        self.eval_sets = {name: one for name, one in datasets.items() if name != TRAIN}
        self.board = TensorBoardWriter(job.tensorboard, first_step, progress.note)
        self.eval_writer = JsonLinesWriter(job.eval_metrics_jsonl, first_step)
        self.metrics_writer = JsonLinesWriter(job.metrics_jsonl, first_step)
        if processes.is_first() and (kept := self.metrics_writer.num_kept) < first_step:
            progress.note(f"note: {job.metrics_jsonl} has lines of {kept} of {first_step} steps; "
                          "the others are lost, and the loss curve lacks them")
        # Read once the writers have dropped the lines after `first_step`.
        self.watched = watched_history(run.early_stopping, job, first_step)
        spikes = SpikeDetector(run.loss_spike_factor, losses_before(run, job))
        self.evaluator = Evaluator(
            partitioner, self.eval_sets, run.max_eval_batches, self.eval_writer, progress.note,
            seed=run.seed,
        )
        self.reports = StepReports(
            partitioner, run, self.metrics_writer, self.board, progress, checkpoints, spikes,
            len(position.skipped),
        )
        self.non_finite = NonFiniteSteps(partitioner, job.non_finite_txt, progress.note)
        self.agreement = Agreement(partitioner.mesh)
        self.watchdog = Watchdog(
            run.watchdog_seconds, exits=run.watchdog_exits, is_saving=checkpoints.is_saving,
            stacks_txt=job.stacks_txt,
        )

    def run(self, state: TrainState, first_step: int) -> Trained:
        run, stop, checkpoints = self.run_config, self.stop, self.checkpoints
        self.reports.begin(state)
        if lacks_evaluation(
            run, self.eval_sets, self.job, checkpoints.latest_step(), first_step
        ) and (trained := self._evaluate_late(first_step, state)):
            return trained
        key, num_rows = self.partitioner.key(run.seed), self.pipeline.batch_size
        rows, num_ids = self.partitioner.process_rows(num_rows), self.partitioner.task.num_ids()
        batches = self.position.batches(self.pipeline, rows)
        step, stopped_by = first_step, None
        for step in range(first_step + 1, run.num_train_steps + 1):
            checkpoints.raise_if_failed()
            began = time.perf_counter()
            index, inputs = next(batches)
            check_ids(inputs, num_ids, f"datasets.{TRAIN}, batch {index}", first_row=rows.start)
            batch = self.partitioner.global_batch(inputs, num_rows)
            self.agreement.host_worked(time.perf_counter() - began)
            with self._compiling(step == first_step + 1):
                state, outputs = self.partitioner.train_step(state, batch, key)
            if run.debug_nans:
                with self.watchdog.during(f"looking for a NaN in step {step}"):
                    self.non_finite.look(step, state, batch, key, outputs)
            stop.step_ended()
            stops, ends_by = self._should_stop(), None
            self.reports.report()
            self.reports.pending = PendingStep(step, index, outputs, inputs, rows.start)
            is_last = step == run.num_train_steps
            evaluates = bool(self.eval_sets) and (is_last or is_due(step, run.eval_every_steps))
            values: dict[str, float] | None = {}
            if evaluates and not stops:
                self.reports.report()
                values = self._evaluate(step, state)
                stops, ends_by = values is None, self._reason_to_end(values)
            ends = is_last or stops or ends_by is not None
            saves = ends or is_due(step, run.checkpoint_every_steps) or checkpoints.retry_is_due()
            if saves:
                self.reports.report()
                self._save(step, state, values or {}, is_last=ends)
            if saves or evaluates:
                self.reports.last_time = time.perf_counter()
            self.watchdog.step_ended(step)
            if stops:
                stopped_by = stop.reason or self.agreement.wanted_by
            elif ends_by:
                self.progress.note(f"stopped early at step {step}: {ends_by}")
            if ends:
                break
        self.reports.report()
        with self.watchdog.during(SAVING):
            checkpoints.wait()
        return _trained(step, state, stopped_by)

    def _compiling(self, is_first: bool) -> contextlib.AbstractContextManager[None]:
        if is_first and self.partitioner.mesh.size > 1:
            return explained_warnings(self.progress.note)
        return contextlib.nullcontext()

    def close(self) -> None:
        self.progress.close()
        self.metrics_writer.close()
        self.eval_writer.close()
        self.board.close()

    def _should_stop(self) -> bool:
        self.watchdog.alive()
        return self.agreement.any(self.stop.reason is not None)

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float] | None:
        """Returns the values by the names that settings give them; None: it was asked to stop.

        A dataset in which no row weighs has none.

        Raises:
          ConfigError: the metric that may stop training is not among them.
        """
        use_ema = self.run_config.eval_use_ema_states
        with self.watchdog.during(f"evaluating step {step}"):
            # Not kept in a variable: averages are another copy of the weights.
            results = self.evaluator.run(
                step, self.partitioner.eval_mdl_vars(state, use_ema=use_ema), self._should_stop
            )
        if results is None:
            return None
        for name, one in results.items():
            self.progress.note(evaluation_line(step, name, one))
        values = watched_values(results)
        self.board.scalars(step, values)
        if (stopping := self.run_config.early_stopping) is not None:
            self.watched[step] = stopping.watched_in(values, step)
        return values

    def _reason_to_end(self, values: Mapping[str, float] | None) -> str | None:
        stopping = self.run_config.early_stopping
        return stopping.reason_to_stop(self.watched) if values and stopping is not None else None

    def _evaluate_late(self, step: int, state: TrainState) -> Trained | None:
        """Evaluates a step whose run was asked to stop before; returns how training ends by it."""
        values = self._evaluate(step, state)
        if values is None:
            return _trained(step, state, self.stop.reason or self.agreement.wanted_by)
        if self.run_config.best_checkpoints is not None:
            # Saved again, with the values that it is judged by.
            self.stop.step_ended()
            self._save(step, state, values, is_last=True)
        if reason := self._reason_to_end(values):
            self.progress.note(f"stopped early at step {step}: {reason}")
            return _trained(step, state)
        return None

    def _save(
        self, step: int, state: TrainState, values: Mapping[str, float], *, is_last: bool
    ) -> None:
        data = {
            **DataPosition.of_step(step, self.position.skipped).as_json(self.pipeline),
            "run_seed": self.run_config.seed,
        }
        with self.watchdog.during(SAVING):
            self.checkpoints.save(
                step, state, self.partitioner.layout, data, values, is_last=is_last
            )


def _trained(step: int, state: TrainState, stopped_by: str | None = None) -> Trained:
    return Trained(step, num_skipped_in_a_row(state), stopped_by)


def num_skipped_in_a_row(state: TrainState) -> int:
    """Returns how many steps in a row, up to the last one made, were skipped."""
    return int(jax.device_get(state.opt_states["num_skipped_in_a_row"]))
