"""The training loop: when a step runs, when it is saved, evaluated and reported."""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.checkpoints import Checkpoints
from praxis_lite.errors import ConfigError
from praxis_lite.experiment import RunConfig
from praxis_lite.inputs import InputPipeline
from praxis_lite.job_dir import JobDir
from praxis_lite.metrics import (
    JsonLinesWriter,
    ProgressLine,
    TensorBoardWriter,
    WeightedMean,
    plot_loss_curve,
)
from praxis_lite.partitioner import Partitioner
from praxis_lite.train_state import TrainState

TRAIN = "train"


class Evaluator:
    """Means of a task's metrics over datasets, written to the job's eval_metrics.jsonl.

    Args:
      pipelines: datasets by name, each one pass long, or `max_eval_batches` of it.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        pipelines: Mapping[str, InputPipeline],
        max_eval_batches: int | None,
        writer: JsonLinesWriter,
    ):
        self._partitioner = partitioner
        self._pipelines = pipelines
        self._max_eval_batches = max_eval_batches
        self._writer = writer

    def run(self, step: int, mdl_vars: Any) -> dict[str, dict[str, float]]:
        """Returns metrics by dataset, weighted over all batches, and writes a line for each."""
        results = {}
        for name, pipeline in self._pipelines.items():
            mean, pending = WeightedMean(), None
            for index, inputs in enumerate(pipeline.batches(**host_of())):
                if index == self._max_eval_batches:
                    break
                batch = self._partitioner.global_batch(inputs)
                scalars = self._partitioner.eval_step(mdl_vars, batch)
                if pending is not None:
                    mean.add(jax.device_get(pending))
                pending = scalars
            if pending is not None:
                mean.add(jax.device_get(pending))
            results[name] = {**mean.result(), **pipeline.baselines()}
            self._writer.write({"step": step, "dataset": name, **results[name]})
        return results


@dataclasses.dataclass
class _Pending:
    """A step whose outputs are still on the devices."""

    step: int
    outputs: Any


def train(
    partitioner: Partitioner,
    datasets: Mapping[str, InputPipeline],
    run: RunConfig,
    job: JobDir,
    checkpoints: Checkpoints,
    state: TrainState,
    first_step: int,
    progress: ProgressLine,
) -> TrainState:
    """Trains from `first_step` to `run.num_train_steps`; returns the last state.

    Step N's line is in metrics.jsonl before the checkpoint of step N is begun. Metrics are read
    one step late, while the next step runs, so the devices never wait for the host.

    Args:
      state: of `first_step`; donated.
      first_step: also the index of the first training batch.
    """
    train_pipeline = datasets[TRAIN]
    key = partitioner.key(run.seed)
    metrics_writer = JsonLinesWriter(job.metrics_jsonl, first_step)
    eval_writer = JsonLinesWriter(job.eval_metrics_jsonl, first_step)
    board = TensorBoardWriter(job.tensorboard, first_step)
    eval_sets = {name: pipeline for name, pipeline in datasets.items() if name != TRAIN}
    evaluator = Evaluator(partitioner, eval_sets, run.max_eval_batches, eval_writer)
    board_every = run.log_every_steps or max(1, run.num_train_steps // 200)
    pending: _Pending | None = None
    last_time = time.perf_counter()

    def report() -> None:
        nonlocal pending, last_time
        if pending is None:
            return
        outputs = jax.device_get(pending.outputs)
        now = time.perf_counter()
        line = _metrics_line(pending.step, outputs, now - last_time, partitioner.task.weight_unit)
        last_time = now
        metrics_writer.write(line)
        if pending.step % board_every == 0 or pending.step == run.num_train_steps:
            board.scalars(pending.step, {n: v for n, v in line.items() if n != "step"})
        progress.update(
            pending.step,
            loss=line["loss"],
            tokens_per_second=line.get("tokens_per_second"),
        )
        num_skipped = int(outputs["learner"]["num_skipped_steps"])
        if num_skipped > report.num_skipped:
            progress.note(
                f"step {pending.step} skipped: its loss or gradient is not finite "
                f"({num_skipped} skipped so far); weights and slots are unchanged"
            )
        report.num_skipped = num_skipped
        pending = None

    report.num_skipped = int(jax.device_get(state.opt_states["num_skipped_steps"]))
    try:
        batches = train_pipeline.batches(start=first_step, **host_of())
        for step in range(first_step + 1, run.num_train_steps + 1):
            batch = partitioner.global_batch(next(batches))
            state, outputs = partitioner.train_step(state, batch, key)
            report()
            pending = _Pending(step, outputs)
            is_last = step == run.num_train_steps
            saves = is_last or _is_due(step, run.checkpoint_every_steps)
            evaluates = bool(eval_sets) and (is_last or _is_due(step, run.eval_every_steps))
            if saves or evaluates:
                report()
            if evaluates:
                for name, results in evaluator.run(step, state.mdl_vars).items():
                    progress.note(evaluation_line(step, name, results))
                    board.scalars(step, {f"{name}/{n}": v for n, v in results.items()})
            if saves:
                data = {"next_batch": step, "fingerprint": train_pipeline.fingerprint()}
                checkpoints.save(step, state, partitioner.layout, data)
            if saves or evaluates:
                last_time = time.perf_counter()
        report()
    finally:
        progress.close()
        metrics_writer.close()
        eval_writer.close()
        board.close()
    title = f"{job.path.name}, {run.num_train_steps} steps"
    plot_loss_curve(job.metrics_jsonl, job.loss_curve_png, job.eval_metrics_jsonl, title)
    return state


def check_num_batches(datasets: Mapping[str, InputPipeline], run: RunConfig) -> None:
    """Checks that training has a batch for every step, and that every evaluation ends.

    Raises:
      ConfigError: names the dataset and what to change.
    """
    for name, pipeline in datasets.items():
        found = pipeline.num_batches
        if name == TRAIN and found is not None and found < run.num_train_steps:
            raise ConfigError(
                f"datasets.{TRAIN} ends after {found} batches, but run.num_train_steps is "
                f"{run.num_train_steps}. Use a pipeline without end (shuffle=True), or make at "
                f"most {found} steps."
            )
        if name != TRAIN and found is None and run.max_eval_batches is None:
            raise ConfigError(
                f"datasets.{name} has no end, so no evaluation on it would end. Use a pipeline of "
                "one pass (shuffle=False, or num_batches), or set run.max_eval_batches."
            )


def check_resumable(data: Mapping[str, Any], pipeline: InputPipeline) -> None:
    """Checks that the training data goes on where the checkpoint left it.

    Args:
      data: what was saved beside the state.

    Raises:
      ConfigError: the pipeline is not the one that the checkpoint was trained with; names what
        differs.
    """
    # What JSON makes of both: a tuple is a list there.
    old, new = (
        dict(_flat(json.loads(json.dumps(one))))
        for one in (data["fingerprint"], pipeline.fingerprint())
    )
    differing = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    if differing:
        found = "; ".join(f"{n} was {old.get(n)!r}, is {new.get(n)!r}" for n in differing)
        raise ConfigError(
            f"datasets.{TRAIN} is not what the checkpoint of step {data['next_batch']} was trained "
            f"with: {found}. Set it back, or start a new job in another job_log_dir."
        )


def _flat(fingerprint: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fingerprint.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def host_of() -> dict[str, int]:
    """Returns which host's rows a pipeline gives here."""
    return {"host_index": jax.process_index(), "num_hosts": jax.process_count()}


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


def evaluation_line(step: int, dataset: str, results: Mapping[str, float]) -> str:
    """Returns an evaluation as a line to read."""
    words = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    return f"step {step}  {dataset}: {words}"
