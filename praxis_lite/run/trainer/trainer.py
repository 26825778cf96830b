"""The training loop: when a step runs, when it is saved, evaluated and reported."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.inputs import check_ids, global_batch
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.position import DataPosition
from praxis_lite.run.checkpoints.checkpoints import Checkpoints
from praxis_lite.run.job import processes
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.job.processes.stop_consensus import StopConsensus
from praxis_lite.run.job.processes.stopping import StopRequest
from praxis_lite.run.job.processes.watchdog import SAVING, Watchdog
from praxis_lite.run.trainer.checks.id_sizes import num_ids_of
from praxis_lite.run.trainer.checks.memory import compile_step
from praxis_lite.run.trainer.evaluation import Evaluator, evaluation_line, watched_values
from praxis_lite.run.trainer.job_history import is_due, lacks_evaluation, watched_history
from praxis_lite.run.trainer.job_on_mesh import JobOnMesh
from praxis_lite.run.trainer.metrics.json_lines import JsonLinesWriter
from praxis_lite.run.trainer.metrics.loss_curve import plot_loss_curve
from praxis_lite.run.trainer.metrics.progress import ProgressLine
from praxis_lite.run.trainer.metrics.tensorboard import TensorBoardWriter
from praxis_lite.run.trainer.step_reports import PendingStep, StepReports
from praxis_lite.tools.explain.compiler_warnings import explained_warnings
from praxis_lite.tools.non_finite.reports import NonFiniteReports


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """Where training begins.

    Attributes:
      step: the number of steps that were made before.
      state: of that step; the first step donates it.
      skipped_batches: indices of the training batches that are left out.
    """

    step: int
    state: TrainState
    skipped_batches: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trained:
    """How training ended.

    Attributes:
      step: the last one made; its checkpoint is saved.
      num_skipped: how many steps in a row, up to the last, were skipped.
      stopped_by: what asked for an early end, such as "SIGTERM", or None.
    """

    step: int
    num_skipped: int
    stopped_by: str | None = None


def train(
    job: JobOnMesh, start: StartingPoint, checkpoints: Checkpoints, stop: StopRequest
) -> Trained:
    """Trains to `run.num_train_steps`, or until training stops early or is asked to stop.

    Step N's line is in metrics.jsonl before the checkpoint of step N is begun. Metrics are read
    one step late, while the next step runs, so the devices never wait for the host.

    Args:
      stop: asked after every step, and before every batch of an evaluation.

    Raises:
      ConfigError: a batch has ids that the model has no row for, or
        `run.max_skipped_steps_in_a_row` steps were skipped; then it names the newest checkpoint
        before them.
      LossSpike: a loss spiked and run.on_loss_spike is "roll_back".
      FailedSave: a checkpoint could not be written.
    """
    loop = _Loop(job, start, checkpoints, stop)
    try:
        with loop.watchdog:
            trained = loop.run(start.state)
    finally:
        loop.close()
    draw_loss_curve(job.files, trained.step, loop.progress.note)
    return trained


def draw_loss_curve(files: JobDir, step: int, note: Callable[[str], None]) -> None:
    """Draws the job's losses up to its last step, or notes why the picture cannot be written."""
    if not processes.is_first():
        return
    title = f"{files.path.name}, {step} steps"
    try:
        plot_loss_curve(
            files.metrics_jsonl, files.loss_curve_png, files.eval_metrics_jsonl, title
        )
    except ConfigError as error:
        note(f"note: {error}")


class _Loop:
    """The loop, with all that it asks and writes to."""

    def __init__(
        self, job: JobOnMesh, start: StartingPoint, checkpoints: Checkpoints, stop: StopRequest
    ):
        run, files = job.run, job.files
        self.job, self.checkpoints, self.stop, self.first_step = job, checkpoints, stop, start.step
        self.position = DataPosition.of_step(start.step, start.skipped_batches)
        self.progress = ProgressLine(
            run.num_train_steps, sys.stdout, run.log_every_steps, start.step
        )
        self.board = TensorBoardWriter(files.tensorboard, start.step, self.progress.note)
        self.eval_writer = JsonLinesWriter(files.eval_metrics_jsonl, start.step)
        self.reports = StepReports(
            job, start.step, len(self.position.skipped), checkpoints, self.board, self.progress
        )
        # Read once the writers have dropped the lines after the first step.
        self.watched = watched_history(run.early_stopping, files, start.step)
        self.evaluator = Evaluator(
            job.partitioner, job.eval_sets, run.max_eval_batches, self.eval_writer,
            self.progress.note, seed=run.seed,
        )
        self.non_finite = NonFiniteReports(
            job.partitioner, files.non_finite_txt, self.progress.note
        )
        self.consensus = StopConsensus(job.partitioner.mesh)
        self._saved_at = time.monotonic()  # Of the newest checkpoint that was begun.
        self.watchdog = Watchdog(
            run.watchdog_seconds, exits=run.watchdog_exits, is_saving=checkpoints.is_saving,
            stacks_txt=files.stacks_txt,
        )

    def run(self, state: TrainState) -> Trained:
        job, run, stop, checkpoints = self.job, self.job.run, self.stop, self.checkpoints
        partitioner, pipeline = job.partitioner, job.datasets[TRAIN]
        if lacks_evaluation(
            run, job.eval_sets, job.files, checkpoints.latest_step(), self.first_step
        ) and (trained := self._evaluate_late(self.first_step, state)):
            return trained
        self._saved_at = time.monotonic()
        key, num_rows = partitioner.key(run.seed), pipeline.batch_size
        rows = partitioner.process_rows(num_rows)
        num_ids = num_ids_of(partitioner.task, pipeline.element_spec())
        batches = self.position.batches(pipeline, rows)
        step, stopped_by = self.first_step, None
        for step in range(self.first_step + 1, run.num_train_steps + 1):
            checkpoints.raise_if_failed()
            began = time.perf_counter()
            index, inputs = next(batches)
            input_time = time.perf_counter() - began
            check_ids(inputs, num_ids, f"datasets.{TRAIN}, batch {index}", first_row=rows.start)
            batch = global_batch(inputs, partitioner.mesh, num_rows)
            self.consensus.host_worked(time.perf_counter() - began)
            if step == self.first_step + 1:
                self._compile()
            state, outputs = partitioner.train_step(state, batch, key)
            if run.debug_nans:
                self.reports.report()  # So that the lines of a step come before those of the next.
                with self.watchdog.during(f"looking for a NaN in step {step}"):
                    self.non_finite.look(step, state, batch, key, outputs)
            stop.step_ended()
            stops, ends_by = self._should_stop(), None
            self.reports.report()
            self.reports.pending = PendingStep(
                step, index, outputs, inputs, rows.start, input_time
            )
            is_last = step == run.num_train_steps
            evaluates = bool(job.eval_sets) and (is_last or is_due(step, run.eval_every_steps))
            values: dict[str, float] | None = {}
            if evaluates and not stops:
                self.reports.report()
                values = self._evaluate(step, state)
                stops, ends_by = values is None, self._reason_to_end(values)
            ends = is_last or stops or ends_by is not None
            saves = (
                ends or is_due(step, run.checkpoint_every_steps) or self.consensus.save_is_due
                or checkpoints.retry_is_due()
            )
            if saves:
                self.reports.report()
                self._save(step, state, values or {}, is_last=ends)
            if saves or evaluates:
                self.reports.last_time = time.perf_counter()
            self.watchdog.step_ended(step)
            if stops:
                stopped_by = self._stopped_by()
            elif ends_by:
                self.progress.note(f"stopped early at step {step}: {ends_by}")
            if ends:
                break
        self.reports.report()
        self.reports.report_input()
        with self.watchdog.during(SAVING):
            checkpoints.wait()
        return Trained(step, num_skipped_in_a_row(state), stopped_by)

    def _compile(self) -> None:
        partitioner, note = self.job.partitioner, self.progress.note
        is_split = partitioner.mesh.size > 1
        with explained_warnings(note) if is_split else contextlib.nullcontext():
            compile_step(partitioner.train_step, self.job.datasets[TRAIN], f"datasets.{TRAIN}")

    def close(self) -> None:
        for one in (self.progress, self.reports, self.eval_writer, self.board):
            one.close()

    def _should_stop(self) -> bool:
        self.watchdog.alive()
        seconds = self.job.run.seconds_between_checkpoints
        is_due = seconds is not None and time.monotonic() - self._saved_at >= seconds
        return self.consensus.reached(self.stop.reason is not None, is_due)

    def _stopped_by(self) -> str:
        return self.stop.reason or self.consensus.wanted_by

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float] | None:
        """Returns metrics as settings name them, or None if it was asked to stop.

        A dataset in which no row has a weight above zero has no metrics. Raises ConfigError if the
        metric that may stop training is not among them.
        """
        run = self.job.run
        with self.watchdog.during(f"evaluating step {step}"):
            # Not kept in a variable: averages are another copy of the weights.
            results = self.evaluator.run(
                step,
                self.job.partitioner.eval_mdl_vars(state, use_ema=run.eval_use_ema_states),
                self._should_stop,
            )
        if results is None:
            return None
        for name, one in results.items():
            self.progress.note(evaluation_line(step, name, one))
        values = watched_values(results)
        self.board.scalars(step, values)
        if run.early_stopping is not None:
            self.watched[step] = run.early_stopping.watched_in(values, step)
        return values

    def _reason_to_end(self, values: Mapping[str, float] | None) -> str | None:
        stopping = self.job.run.early_stopping
        return stopping.reason_to_stop(self.watched) if values and stopping is not None else None

    def _evaluate_late(self, step: int, state: TrainState) -> Trained | None:
        """Makes the evaluation that a former run was stopped in.

        Returns how training ends by it, or None if it goes on.
        """
        values, stopped_by = self._evaluate(step, state), None
        if values is None:
            stopped_by = self._stopped_by()
        elif self.job.run.best_checkpoints is not None:
            # Saved again, with the values that it is judged by.
            self.stop.step_ended()
            self._save(step, state, values, is_last=True)
        if reason := self._reason_to_end(values):
            self.progress.note(f"stopped early at step {step}: {reason}")
        if stopped_by or reason:
            return Trained(step, num_skipped_in_a_row(state), stopped_by)
        return None

    def _save(
        self, step: int, state: TrainState, values: Mapping[str, float], *, is_last: bool
    ) -> None:
        position = DataPosition.of_step(step, self.position.skipped)
        data = {
            **position.as_json(self.job.datasets[TRAIN]), "run_seed": self.job.run.seed
        }
        self._saved_at = time.monotonic()
        self.consensus.saved()
        with self.watchdog.during(SAVING):
            self.checkpoints.save(
                step, state, self.job.partitioner.layout, data, values, is_last=is_last
            )


def num_skipped_in_a_row(state: TrainState) -> int:
    """Returns the number of steps skipped in a row, up to the last step made."""
    return int(jax.device_get(state.opt_states["num_skipped_in_a_row"]))
