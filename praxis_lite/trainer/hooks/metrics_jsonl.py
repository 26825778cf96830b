"""Hooks that write metrics.jsonl, eval_metrics.jsonl and the progress line."""

import contextlib
import logging
from collections.abc import Mapping

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job.events import INPUT_WAIT, STEP, events
from praxis_lite.trainer.evaluation import evaluation_line
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter
from praxis_lite.trainer.metrics.progress import ProgressLine
from praxis_lite.trainer.metrics.rates import Pause, Rates
from praxis_lite.trainer.metrics.step_times import EVALUATION_TIME, SAVE_TIME


class MetricsFiles(Hook):
    """Writes metrics.jsonl one step late, and eval_metrics.jsonl after each evaluation.

    Before training, the lines for steps that will be recomputed are moved to NAME.lost.jsonl.
    """

    every, waits = None, False

    def __init__(self, job: JobOnMesh):
        self._job, self._stack = job, contextlib.ExitStack()

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        files, first_step, enter = self._job.files, loop.first_step, self._stack.enter_context
        self._eval_writer = enter(JsonLinesWriter(files.eval_metrics_jsonl, first_step))
        self._writer = enter(JsonLinesWriter(files.metrics_jsonl, first_step))
        if not loop.is_first:
            return
        if lost := self._writer.lost_steps:
            events.report(lost_to=lost[1])
            loop.note(
                f"steps {lost[0]} to {lost[1]} were not saved and will be recomputed; their lines "
                f"were moved to {self._writer.lost_path.name}"
            )
        if self._writer.newest_kept < first_step:
            loop.note(
                f"note: {files.metrics_jsonl} has lines for only {self._writer.num_lines()} "
                f"of {first_step} steps; the other steps are missing in the loss curve"
            )

    def after_metrics(self, metrics: StepMetrics) -> None:
        self._writer.write(metrics.line)

    def after_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for name, values in results.items():
            self._eval_writer.write({"step": step, "dataset": name, **values})

    def __exit__(self, *exc_info: object) -> None:
        self._stack.__exit__(*exc_info)  # type: ignore[arg-type]  # `Hook` takes objects.


class Progress(Hook):
    """Logs losses, speeds, evaluation results, and the share of time spent waiting for input."""

    every, waits = None, False

    def __init__(self, job: JobOnMesh, line: ProgressLine):
        self._weight_unit, self._line, run = job.partitioner.task.weight_unit, line, job.run
        pauses = {
            EVALUATION_TIME: Pause(run.evaluation.every_steps),
            SAVE_TIME: Pause(run.checkpoints.every_steps, run.checkpoints.seconds_between),
        }
        self._rates = Rates(run.num_train_steps, job.partitioner.mesh.size, pauses)

    def after_metrics(self, metrics: StepMetrics) -> None:
        seconds = events.seconds()
        self._rates.add(metrics.line, metrics.weight, seconds[STEP] + seconds[INPUT_WAIT])
        self._line.update(
            metrics.step,
            metrics.line["loss"],
            self._rates,
            has_tokens=self._weight_unit == "tokens",
        )

    def after_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for name, values in results.items():
            _log.info(evaluation_line(step, name, values))

    def after_training(self, step: int) -> None:
        if summary := self._rates.input_summary(self._weight_unit):
            _log.info(summary)

    def __exit__(self, *exc_info: object) -> None:
        self._line.close()


_log = logging.getLogger(__name__)
