"""The training loop: when a step runs, when it is saved, evaluated and reported."""

import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite import processes
from praxis_lite.agreement import Agreement
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.early_stopping import EarlyStopping
from praxis_lite.errors import ConfigError
from praxis_lite.evaluation import Evaluator, evaluation_line, watched_values
from praxis_lite.experiment import RunConfig
from praxis_lite.inputs import InputPipeline
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job_checks import TRAIN
from praxis_lite.job_dir import JobDir
from praxis_lite.loss_spikes import LossSpike, SpikeDetector, losses_of
from praxis_lite.metrics import (
    JsonLinesWriter,
    ProgressLine,
    TensorBoardWriter,
    plot_loss_curve,
    read_json_lines,
)
from praxis_lite.non_finite import NonFiniteSteps
from praxis_lite.partitioner import Partitioner
from praxis_lite.stopping import StopRequest
from praxis_lite.train_state import TrainState
from praxis_lite.watchdog import SAVING, Watchdog


@dataclasses.dataclass(frozen=True)
class Trained:
    """How training ended.

    Attributes:
      step: the last one made; its checkpoint is saved.
      stopped_by: what asked for an early end, such as "SIGTERM"; None: nothing did.
    """

    step: int
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
      ConfigError: `run.max_skipped_steps_in_a_row` steps were skipped; names the newest checkpoint
        from before.
      LossSpike: where run.on_loss_spike is "roll_back".
      FailedSave: a checkpoint could not be written.
    """
    train_pipeline = datasets[TRAIN]
    key = partitioner.key(run.seed)
    eval_sets = {name: pipeline for name, pipeline in datasets.items() if name != TRAIN}
    board = TensorBoardWriter(job.tensorboard, first_step, progress.note)
    eval_writer = JsonLinesWriter(job.eval_metrics_jsonl, first_step)
    evaluator = Evaluator(partitioner, eval_sets, run.max_eval_batches, eval_writer)
    metrics_writer = JsonLinesWriter(job.metrics_jsonl, first_step)
    spikes = SpikeDetector(run.loss_spike_factor, _losses_before(run, job))
    reporter = _Reporter(
        partitioner, run, metrics_writer, board, progress, checkpoints, state, spikes,
        len(set(skipped_batches)),
    )
    non_finite = NonFiniteSteps(partitioner, job.non_finite_txt, progress.note)
    watched = watched_history(run.early_stopping, job, first_step)
    agreement = Agreement(partitioner.mesh)
    watchdog = Watchdog(
        run.watchdog_seconds, exits=run.watchdog_exits, stacks_txt=job.stacks_txt
    )

    def should_stop() -> bool:
        watchdog.alive()
        return agreement.any(stop.reason is not None)

    def evaluate(step: int, state: TrainState) -> dict[str, float]:
        """Returns the values by the names that settings give them; {}: it was asked to stop."""
        # Not kept in a variable: averages are another copy of the weights.
        with watchdog.during(f"evaluating step {step}"):
            results = evaluator.run(
                step, partitioner.eval_mdl_vars(state, use_ema=run.eval_use_ema_states), should_stop
            )
        if results is None:
            return {}
        for name, one in results.items():
            progress.note(evaluation_line(step, name, one))
        values = watched_values(results)
        board.scalars(step, values)
        if run.early_stopping is not None:
            watched[step] = values[run.early_stopping.metric]
        return values

    stopped_by, step = None, first_step
    try:
        with watchdog:
            last_step = run.num_train_steps
            position = DataPosition.of_step(first_step, tuple(skipped_batches))
            if lacks_evaluation(run, eval_sets, job, checkpoints.latest_step(), first_step):
                # The run that saved this step was asked to stop before it was evaluated.
                values = evaluate(first_step, state)
                if values and run.best_checkpoints is not None:
                    # Saved again, with the values that it is judged by.
                    stop.step_ended()
                    data = position.as_json(train_pipeline)
                    with watchdog.during(SAVING):
                        checkpoints.save(
                            first_step, state, partitioner.layout, data, values, is_last=True
                        )
                if not values:
                    stopped_by, last_step = stop.reason or agreement.wanted_by, first_step
                elif run.early_stopping and (reason := run.early_stopping.reason_to_stop(watched)):
                    progress.note(f"stopped early at step {first_step}: {reason}")
                    last_step = first_step
            num_rows = train_pipeline.batch_size
            batches = position.batches(train_pipeline, partitioner.process_rows(num_rows))
            for step in range(first_step + 1, last_step + 1):
                checkpoints.raise_if_failed()
                began = time.perf_counter()
                index, inputs = next(batches)
                batch = partitioner.global_batch(inputs, num_rows)
                agreement.host_worked(time.perf_counter() - began)
                state, outputs = partitioner.train_step(state, batch, key)
                if run.debug_nans:
                    with watchdog.during(f"looking for a NaN in step {step}"):
                        non_finite.look(step, state, batch, key, outputs)
                stop.step_ended()
                stops = should_stop()
                reporter.report()
                reporter.pending = _Pending(step, index, outputs)
                is_last = step == run.num_train_steps
                evaluates = bool(eval_sets) and (is_last or _is_due(step, run.eval_every_steps))
                values, reason_to_stop = {}, None
                if evaluates and not stops:
                    reporter.report()
                    values = evaluate(step, state)
                    stops = not values
                    if values and run.early_stopping is not None:
                        reason_to_stop = run.early_stopping.reason_to_stop(watched)
                saves = (
                    is_last or stops or reason_to_stop or _is_due(step, run.checkpoint_every_steps)
                    or checkpoints.retry_is_due()
                )
                if saves:
                    reporter.report()
                    data = DataPosition.of_step(step, position.skipped).as_json(train_pipeline)
                    with watchdog.during(SAVING):
                        checkpoints.save(
                            step, state, partitioner.layout, data, values,
                            is_last=bool(is_last or stops or reason_to_stop),
                        )
                if saves or evaluates:
                    reporter.last_time = time.perf_counter()
                watchdog.step_ended(step)
                if stops:
                    stopped_by = stop.reason or agreement.wanted_by
                    break
                if reason_to_stop:
                    progress.note(f"stopped early at step {step}: {reason_to_stop}")
                    break
            reporter.report()
            with watchdog.during(SAVING):
                checkpoints.wait()
    finally:
        progress.close()
        metrics_writer.close()
        eval_writer.close()
        board.close()
    title = f"{job.path.name}, {step} steps"
    try:
        if processes.is_first():
            plot_loss_curve(job.metrics_jsonl, job.loss_curve_png, job.eval_metrics_jsonl, title)
    except OSError as error:
        progress.note(f"note: {job.loss_curve_png} could not be written: {error.strerror}")
    return Trained(step, stopped_by)


def lacks_evaluation(
    run: RunConfig,
    eval_sets: Collection[str],
    job: JobDir,
    saved_step: int | None,
    step: int,
) -> bool:
    """Returns whether a job that goes on from its own checkpoint has yet to evaluate that step."""
    is_due = step == run.num_train_steps or _is_due(step, run.eval_every_steps)
    if step != saved_step or not is_due:
        return False
    evaluated = {line["dataset"] for line in _evaluations(job) if line["step"] == step}
    return _of_first("lacks evaluation", bool(eval_sets) and evaluated.isdisjoint(eval_sets))


def watched_history(
    early_stopping: EarlyStopping | None, job: JobDir, last_step: int
) -> dict[int, float]:
    """Returns the metric that may stop training, by step, of the evaluations to `last_step`."""
    if early_stopping is None:
        return {}
    dataset, metric = early_stopping.metric.split("/", 1)
    values: dict[int, float] = {}
    for line in _evaluations(job):
        if line["dataset"] == dataset and metric in line and line["step"] <= last_step:
            # The first of a step is training's own; --mode=eval adds others.
            values.setdefault(line["step"], line[metric])
    return dict(_of_first("watched history", list(values.items())))


def _evaluations(job: JobDir) -> list[dict[str, Any]]:
    path = job.eval_metrics_jsonl
    return read_json_lines(path) if path.exists() else []


def _of_first(name: str, value: Any) -> Any:
    """Returns what the first process has found in the job's files, which are its alone."""
    return json.loads(processes.exchange(name, json.dumps(value))[0])


def _losses_before(run: RunConfig, job: JobDir) -> list[float]:
    """Returns the losses that a spike is judged by, as the first process has them on disk."""
    if run.loss_spike_factor is None:
        return []
    losses = losses_of(read_json_lines(job.metrics_jsonl))
    return json.loads(processes.exchange("losses before", json.dumps(losses))[0])


@dataclasses.dataclass
class _Pending:
    """A step whose outputs are still on the devices; `batch` is the index of its batch."""

    step: int
    batch: int
    outputs: Any


class _Reporter:
    """Reads what a step put out, once the next one runs, and says it everywhere it is said.

    Attributes:
      pending: the step to be read next.
      last_time: when the step before it was read, in seconds of time.perf_counter.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        run: RunConfig,
        writer: JsonLinesWriter,
        board: TensorBoardWriter,
        progress: ProgressLine,
        checkpoints: Checkpoints,
        state: TrainState,
        spikes: SpikeDetector,
        num_batches_left_out: int,
    ):
        self._weight_unit = partitioner.task.weight_unit
        self._run, self._writer, self._board = run, writer, board
        self._progress, self._checkpoints = progress, checkpoints
        self._spikes, self._num_left_out = spikes, num_batches_left_out
        self._num_skipped = int(jax.device_get(state.opt_states["num_skipped_steps"]))
        self._board_every = run.log_every_steps or max(1, run.num_train_steps // 200)
        self.pending: _Pending | None = None
        self.last_time = time.perf_counter()

    def report(self) -> None:
        if self.pending is None:
            return
        step, batch = self.pending.step, self.pending.batch
        outputs = jax.device_get(self.pending.outputs)
        self.pending = None
        now = time.perf_counter()
        line = _metrics_line(step, outputs, now - self.last_time, self._weight_unit)
        self.last_time = now
        median = self._spikes.median_below(line["loss"])
        if self._run.loss_spike_factor is not None:
            line |= {"is_loss_spike": int(median is not None)}
            line |= {"num_batches_left_out": self._num_left_out}
        self._writer.write(line)
        if step % self._board_every == 0 or step == self._run.num_train_steps:
            self._board.scalars(step, {n: v for n, v in line.items() if n != "step"})
        self._progress.update(
            step, loss=line["loss"], tokens_per_second=line.get("tokens_per_second")
        )
        if median is not None:
            self._progress.note(
                f"step {step}: loss spike: {line['loss']:.4f} is {line['loss'] / median:.1f} times "
                f"{median:.4f}, the median of the losses before (run.loss_spike_factor is "
                f"{self._run.loss_spike_factor})"
            )
            if self._run.on_loss_spike == "roll_back":
                raise LossSpike(step, batch)
        self._report_skipped(step, outputs["learner"])

    def _report_skipped(self, step: int, learner: Mapping[str, Any]) -> None:
        num_skipped = int(learner["num_skipped_steps"])
        if num_skipped > self._num_skipped:
            self._progress.note(
                f"step {step} skipped: its loss, gradient or learning rate is not finite, or its "
                f"gradient too large ({num_skipped} skipped so far); weights and slots stay"
            )
        self._num_skipped = num_skipped
        in_a_row, most = int(learner["num_skipped_in_a_row"]), self._run.max_skipped_steps_in_a_row
        if most is not None and in_a_row >= most:
            last_good = step - in_a_row
            kept = [saved for saved in self._checkpoints.all_steps() if saved <= last_good]
            checkpoint = (
                f"The newest checkpoint from before is of step {kept[-1]}, in "
                f"{self._checkpoints.directory}"
                if kept
                else "There is no checkpoint from before"
            )
            raise ConfigError(
                f"The last {in_a_row} steps, to step {step}, were skipped, because their loss, "
                "gradient or learning rate was not finite, or their gradient too large; step "
                f"{last_good} was the last good one. "
                f"{checkpoint}. Look at grad_norm and learning_rate in metrics.jsonl, lower the "
                "learning rate, clip, or take bfloat16 in place of float16; to go on skipping, "
                "raise run.max_skipped_steps_in_a_row (None: no limit)."
            )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _metrics_line(
    step: int, outputs: Mapping[str, Any], seconds: float, weight_unit: str
) -> dict[str, Any]:
    metrics = {name: float(value) for name, (value, _) in outputs["metrics"].items()}
    learner = {name: np.asarray(value).item() for name, value in outputs["learner"].items()}
    weight = float(outputs["metrics"]["loss"][1])
    return {
        "step": step,
        **metrics,
        **learner,
        "step_time": seconds,
        f"{weight_unit}_per_second": weight / seconds,
    }
