"""Evaluates weights on datasets, by computing weighted means of the task's metrics."""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.checkpoints.steps.verified_steps import Step
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.batch_sharding import check_ids, global_batch
from praxis_lite.core.task import records_of
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.numpy_data import InMemory
from praxis_lite.inputs.pipeline_checks import checked_batches, non_finite_rows
from praxis_lite.job.events import COMPILE, DISPATCH, ON_DEVICES, events
from praxis_lite.trainer.checks.id_sizes import num_ids_of
from praxis_lite.trainer.compilation import compile_step, compile_together
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.json_lines import append_lines
from praxis_lite.trainer.metrics.packed import Packed, pack_scalars
from praxis_lite.trainer.metrics.progress import metric_text
from praxis_lite.trainer.metrics.records import write_records
from praxis_lite.trainer.restored_weights import restored_weights

_log = logging.getLogger(__name__)

Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Computes weighted means of a task's metrics over a single pass through each dataset.

    Attributes:
      partitioner: Partitioner of the task, with its mesh.
      pipelines: Evaluation datasets, keyed by name.
      max_eval_batches: Maximum number of batches to evaluate per dataset; None for all batches.
      seed: Seed for the random keys that the task may use in `compute_eval_loss`.
    """

    partitioner: Partitioner
    pipelines: Mapping[str, InputPipeline]
    max_eval_batches: int | None
    seed: int = dataclasses.field(default=0, kw_only=True)

    def run(
        self,
        step: int,
        mdl_vars: Any,
        should_stop: Callable[[], bool] = lambda: False,
        examples: dict[str, list[dict[str, Any]]] | None = None,
    ) -> dict[str, dict[str, float]] | None:
        """Evaluates weights on every dataset.

        Args:
          step: The training step that produced the weights; folded into the random keys.
          mdl_vars: The weights, on the mesh.
          should_stop: Called before each batch. If it returns True, the evaluation ends without a
            result.
          examples: Dict to which a list of records is added for each dataset. A record contains the
            task's outputs for one example; padding rows have no record. If None, these outputs are
            not computed.

        Returns:
          Metrics, keyed by dataset, or None if `should_stop` returned True.

        Raises:
          ConfigError: A batch has ids outside the model's vocabulary.
        """
        results, partitioner = {}, self.partitioner
        run = partitioner.eval_step if examples is None else partitioner.eval_examples
        for name, pipeline in self.pipelines.items():
            num_ids = num_ids_of(partitioner.task, pipeline.element_spec())
            mean = WeightedMean()
            # Outputs are read one batch late, so that the devices never wait for the host.
            pending: tuple[Packed, list[Any]] | None = None
            records: list[dict[str, Any]] = []
            rows = partitioner.process_rows(pipeline.batch_size)
            for index, inputs in checked_batches(pipeline, f"datasets.{name}", rows=rows):
                if index == self.max_eval_batches:
                    break
                if should_stop():
                    return None
                where = f"datasets.{name}, batch {index}"
                first_row = pipeline.rows_of_batch(index, rows).start
                check_ids(inputs, num_ids, where, first_row=first_row)
                if index == 0:
                    with events.phase(COMPILE):
                        compile_step(run, pipeline, f"datasets.{name}")
                batch = global_batch(inputs, partitioner.mesh, pipeline.num_rows(index))
                key = partitioner.batch_key(self.seed, step, index)
                with events.phase(DISPATCH):
                    outputs = run(mdl_vars, batch, key)
                metrics, *row_outputs = (outputs,) if examples is None else outputs
                if pending is not None:
                    _add(mean, records, *pending)
                pending = pack_scalars(metrics), row_outputs
            if pending is not None:
                _add(mean, records, *pending)
            if examples is not None and records:
                examples[name] = records
            results[name] = {**mean.result(), **pipeline.baselines()}
            if not all(map(math.isfinite, mean.result().values())):
                self._note_non_finite(name, rows)
        return results

    def _note_non_finite(self, name: str, rows: slice) -> None:
        """Rereads the data and reports the first batch that contains NaN or infinity."""
        pipeline = self.pipelines[name]
        batches = pipeline.batches(rows=rows)
        for index, inputs in enumerate(itertools.islice(batches, self.max_eval_batches)):
            example_of = functools.partial(pipeline.example_of, index)
            first_row = pipeline.rows_of_batch(index, rows).start
            if message := non_finite_rows(inputs, first_row, example_of):
                _log.info("datasets.%s: batch %d (counted from 0) has %s", name, index, message)
                return


class WeightedMean:
    """Accumulates the mean of each metric, sum(value * weight) / sum(weight), in float64.

    Pairs with weight 0 are ignored, because a batch of padding rows may report NaN, and 0 * NaN is
    NaN. A NaN with a positive weight makes the mean NaN.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, scalars: Mapping[str, tuple[Any, Any]]) -> None:
        """Adds a batch's metrics, (value, weight) by name.

        The values and weights are scalars: numbers, or NumPy or JAX arrays of shape ().

        Raises:
          ConfigError: A weight is negative or not finite.
        """
        for name, (value, weight) in scalars.items():
            weight = float(weight)
            require(
                math.isfinite(weight) and weight >= 0,
                f"The weight of metric {name!r}",
                weight,
                "a finite non-negative number",
            )
            if weight > 0:
                self._sums[name] = self._sums.get(name, 0.0) + float(value) * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, float]:
        """Returns the mean of each metric whose total weight is not 0."""
        return {name: total / self._weights[name] for name, total in self._sums.items()}


def _add(
    mean: WeightedMean, records: list[dict[str, Any]], metrics: Packed, row_outputs: list[Any]
) -> None:
    """Waits for a batch's outputs, and adds the batch's metrics and example records.

    Args:
      mean: The running means to update.
      records: The list to extend.
      metrics: The batch's metrics.
      row_outputs: [per-example outputs, mask that is False for padding rows], or [] if records are
        not collected.
    """
    with events.phase(ON_DEVICES):
        scalars, row_outputs = metrics.to_host(), jax.device_get(row_outputs)
    mean.add(scalars)
    if row_outputs and row_outputs[0]:
        records += records_of(*row_outputs)


def evaluate(job: JobOnMesh, step: Step) -> None:
    """Evaluates a checkpoint on every dataset except `train`, and prints and records the results.

    Args:
      job: The job, placed on its mesh.
      step: The checkpoint's step, "best", or None for the newest checkpoint.

    Raises:
      ConfigError: There is no evaluation dataset, or the checkpoint does not exist.
    """
    partitioner, run = job.partitioner, job.run
    if not job.eval_sets:
        raise ConfigError(
            "The experiment has no evaluation dataset, only 'train'. Add an evaluation dataset to "
            'its datasets(), such as "heldout": fdl.Config(TextWindows, ..., shuffle=False).'
        )
    compile_together(
        (partitioner.eval_examples, pipeline, f"datasets.{name}")
        for name, pipeline in job.eval_sets.items()
    )
    step, mdl_vars = restored_weights(partitioner, job.files, step, run.evaluation.use_ema_states)
    evaluator = Evaluator(partitioner, job.eval_sets, run.evaluation.max_batches, seed=run.seed)
    examples: dict[str, list[dict[str, Any]]] = {}
    results = evaluator.run(step, mdl_vars, examples=examples)
    assert results is not None, "Nothing stops this evaluation."
    append_lines(
        job.files.eval_metrics_jsonl,
        [{"step": step, "dataset": name, **metrics} for name, metrics in results.items()],
    )
    for name, metrics in results.items():
        print(evaluation_line(step, name, metrics))
    for name, records in examples.items():
        path = job.files.eval_jsonl(name, step)
        write_records(path, records)
        count = "1 example" if len(records) == 1 else f"{len(records)} examples"
        print(
            f"evaluated {count} of {name} with the weights of step {step}: {job.files.shown(path)}"
        )


def watched_values(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns an evaluation's metrics under the names used in settings, such as "heldout/loss"."""
    return {f"{name}/{n}": value for name, result in results.items() for n, value in result.items()}


def evaluation_line(step: int, dataset: str, results: Mapping[str, float]) -> str:
    """Formats an evaluation's metrics as a line of text."""
    text = "  ".join(f"{name} {metric_text(value)}" for name, value in results.items())
    return f"step {step}  {dataset}: {text or 'no metrics, because every row has weight 0'}"


def in_memory(data: Batch | Iterable[Batch]) -> InMemory:
    """Returns a pipeline over the rows in all batches, with the batch size of the largest batch.

    Args:
      data: A batch, which is a dict of NumPy arrays, or an iterable of batches.

    Raises:
      ConfigError: There are no batches, or the batches have different keys or shapes.
    """
    batches = [data] if isinstance(data, Mapping) else list(data)
    for batch in batches:
        if not isinstance(batch, Mapping) or batch.keys() != batches[0].keys():
            actual = (
                f"with the keys {sorted(batch)}"
                if isinstance(batch, Mapping)
                else f"of type {type(batch).__name__}"
            )
            raise ConfigError(
                f"evaluate was given a batch {actual}; expected a dict of NumPy arrays with the "
                "same keys in every batch."
            )
    if not batches:
        raise ConfigError("evaluate was given no batches. Pass at least one batch.")
    arrays = {name: [np.asarray(batch[name]) for batch in batches] for name in batches[0]}
    max_rows = max((len(x) for xs in arrays.values() for x in xs if x.ndim), default=1)
    try:
        joined = {name: np.concatenate(xs) if xs[0].ndim else xs[0] for name, xs in arrays.items()}
    except ValueError as error:
        raise ConfigError(f"evaluate was given invalid batches: {error}.") from None
    return InMemory(joined, batch_size=max(max_rows, 1), shuffle=False)
