"""The training loop: when a step runs, when it is saved, evaluated and reported."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.early_stopping import EarlyStopping
from praxis_lite.errors import ConfigError
from praxis_lite.evaluation import Evaluator, evaluation_line, host_of, watched_values
from praxis_lite.experiment import RunConfig
from praxis_lite.inputs import InputPipeline
from praxis_lite.job_checks import TRAIN
from praxis_lite.job_dir import JobDir
from praxis_lite.metrics import (
    JsonLinesWriter,
    ProgressLine,
    TensorBoardWriter,
    plot_loss_curve,
    read_json_lines,
)
from praxis_lite.partitioner import Partitioner
from praxis_lite.train_state import TrainState


def train(
    partitioner: Partitioner,
    datasets: Mapping[str, InputPipeline],
    run: RunConfig,
    job: JobDir,
    checkpoints: Checkpoints,
    state: TrainState,
    first_step: int,
    progress: ProgressLine,
) -> int:
    """Trains to `run.num_train_steps`, or until it stops early, and returns the last step.

    Step N's line is in metrics.jsonl before the checkpoint of step N is begun. Metrics are read
    one step late, while the next step runs, so the devices never wait for the host.

    Args:
      state: of `first_step`; donated.
      first_step: also the index of the first training batch.

    Raises:
      ConfigError: `run.max_skipped_steps_in_a_row` steps were skipped; names the newest checkpoint
        from before.
    """
    train_pipeline = datasets[TRAIN]
    key = partitioner.key(run.seed)
    eval_sets = {name: pipeline for name, pipeline in datasets.items() if name != TRAIN}
    board = TensorBoardWriter(job.tensorboard, first_step)
    eval_writer = JsonLinesWriter(job.eval_metrics_jsonl, first_step)
    evaluator = Evaluator(partitioner, eval_sets, run.max_eval_batches, eval_writer)
    metrics_writer = JsonLinesWriter(job.metrics_jsonl, first_step)
    reporter = _Reporter(partitioner, run, metrics_writer, board, progress, checkpoints, state)
    watched = watched_history(run.early_stopping, job, first_step)
    try:
        batches = train_pipeline.batches(start=first_step, **host_of())
        for step in range(first_step + 1, run.num_train_steps + 1):
            batch = partitioner.global_batch(next(batches))
            state, outputs = partitioner.train_step(state, batch, key)
            reporter.report()
            reporter.pending = _Pending(step, outputs)
            is_last = step == run.num_train_steps
            evaluates = bool(eval_sets) and (is_last or _is_due(step, run.eval_every_steps))
            values, reason_to_stop = {}, None
            if evaluates:
                reporter.report()
                # Not kept in a variable: averages are another copy of the weights.
                results = evaluator.run(
                    step, partitioner.eval_mdl_vars(state, use_ema=run.eval_use_ema_states)
                )
                for name, one in results.items():
                    progress.note(evaluation_line(step, name, one))
                values = watched_values(results)
                board.scalars(step, values)
                if run.early_stopping is not None:
                    watched[step] = values[run.early_stopping.metric]
                    reason_to_stop = run.early_stopping.reason_to_stop(watched)
            saves = is_last or reason_to_stop or _is_due(step, run.checkpoint_every_steps)
            if saves:
                reporter.report()
                data = {"next_batch": step, "fingerprint": train_pipeline.fingerprint()}
                checkpoints.save(step, state, partitioner.layout, data, values)
            if saves or evaluates:
                reporter.last_time = time.perf_counter()
            if reason_to_stop:
                progress.note(f"stopped early at step {step}: {reason_to_stop}")
                break
        reporter.report()
    finally:
        progress.close()
        metrics_writer.close()
        eval_writer.close()
        board.close()
    title = f"{job.path.name}, {step} steps"
    plot_loss_curve(job.metrics_jsonl, job.loss_curve_png, job.eval_metrics_jsonl, title)
    return step


def watched_history(
    early_stopping: EarlyStopping | None, job: JobDir, last_step: int
) -> dict[int, float]:
    """Returns the metric that may stop training, by step, of the evaluations to `last_step`."""
    if early_stopping is None or not job.eval_metrics_jsonl.exists():
        return {}
    dataset, metric = early_stopping.metric.split("/", 1)
    values: dict[int, float] = {}
    for line in read_json_lines(job.eval_metrics_jsonl):
        if line["dataset"] == dataset and metric in line and line["step"] <= last_step:
            # The first of a step is training's own; --mode=eval adds others.
            values.setdefault(line["step"], line[metric])
    return values


@dataclasses.dataclass
class _Pending:
    """A step whose outputs are still on the devices."""

    step: int
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
    ):
        self._weight_unit = partitioner.task.weight_unit
        self._run, self._writer, self._board = run, writer, board
        self._progress, self._checkpoints = progress, checkpoints
        self._num_skipped = int(jax.device_get(state.opt_states["num_skipped_steps"]))
        self._board_every = run.log_every_steps or max(1, run.num_train_steps // 200)
        self.pending: _Pending | None = None
        self.last_time = time.perf_counter()

    def report(self) -> None:
        if self.pending is None:
            return
        step, outputs = self.pending.step, jax.device_get(self.pending.outputs)
        self.pending = None
        now = time.perf_counter()
        line = _metrics_line(step, outputs, now - self.last_time, self._weight_unit)
        self.last_time = now
        self._writer.write(line)
        if step % self._board_every == 0 or step == self._run.num_train_steps:
            self._board.scalars(step, {n: v for n, v in line.items() if n != "step"})
        self._progress.update(
            step, loss=line["loss"], tokens_per_second=line.get("tokens_per_second")
        )
        self._report_skipped(step, outputs["learner"])

    def _report_skipped(self, step: int, learner: Mapping[str, Any]) -> None:
        num_skipped = int(learner["num_skipped_steps"])
        if num_skipped > self._num_skipped:
            self._progress.note(
                f"step {step} skipped: its loss or gradient is not finite, or too large "
                f"({num_skipped} skipped so far); weights and slots are unchanged"
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
                f"The last {in_a_row} steps, to step {step}, were skipped, because their loss or "
                f"gradient was not finite or too large; step {last_good} was the last good one. "
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
