"""Means of a task's metrics over datasets: when and over what they are taken, and their lines."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from praxis_lite.inputs import InputPipeline
from praxis_lite.inputs.batches import check_ids, checked_batches, non_finite_rows
from praxis_lite.partitioner import Partitioner
from praxis_lite.trainer.metrics import JsonLinesWriter, WeightedMean, WeightedScalars
from praxis_lite.trainer.metrics.records import records_of


class Evaluator:
    """Means of a task's metrics over datasets, written to the job's eval_metrics.jsonl.

    Args:
      pipelines: datasets by name, each one pass long, or `max_eval_batches` of it.
      writer: of the job's file; None: nothing is written.
      note: told of NaN in a dataset whose metrics are not finite.
      seed: of the keys that a task may draw with (`Task.compute_eval_loss`).
    """

    def __init__(
        self,
        partitioner: Partitioner,
        pipelines: Mapping[str, InputPipeline],
        max_eval_batches: int | None,
        writer: JsonLinesWriter | None,
        note: Callable[[str], None] = print,
        *,
        seed: int = 0,
    ):
        self._partitioner = partitioner
        self._pipelines = pipelines
        self._max_eval_batches = max_eval_batches
        self._writer, self._seed = writer, seed
        self._note = note

    def run(
        self,
        step: int,
        mdl_vars: Any,
        should_stop: Callable[[], bool] = lambda: False,
        examples: dict[str, list[dict[str, Any]]] | None = None,
    ) -> dict[str, dict[str, float]] | None:
        """Returns metrics by dataset, weighted over all batches, and writes a line for each.

        Args:
          step: of the weights.
          should_stop: asked before each batch; None is returned, and nothing written, if it is so.
          examples: filled, by dataset, with a record for each true row that the task has
            per-example outputs for. None: they are not worked out.

        Raises:
          ConfigError: a batch has ids that the model has no row for.
        """
        results, num_ids = {}, self._partitioner.task.num_ids()
        for name, pipeline in self._pipelines.items():
            mean, pending, records = WeightedMean(), None, []
            num_rows = pipeline.batch_size
            rows = self._partitioner.process_rows(num_rows)
            for index, inputs in checked_batches(pipeline, f"datasets.{name}", rows=rows):
                if index == self._max_eval_batches:
                    break
                if should_stop():
                    return None
                where = f"datasets.{name}, batch {index}"
                check_ids(inputs, num_ids, where, first_row=rows.start)
                batch = self._partitioner.global_batch(inputs, num_rows)
                key = self._partitioner.batch_key(self._seed, step, index)
                if examples is None:
                    outputs = (self._partitioner.eval_step(mdl_vars, batch, key),)
                else:
                    outputs = self._partitioner.eval_examples(mdl_vars, batch, key)
                if pending is not None:
                    _add(mean, records, *jax.device_get(pending))
                pending = outputs
            if pending is not None:
                _add(mean, records, *jax.device_get(pending))
            if examples is not None and records:
                examples[name] = records
            results[name] = {**mean.result(), **pipeline.baselines()}
            if not all(map(math.isfinite, mean.result().values())):
                self._note_non_finite(name, rows)
        for name, one in results.items() if self._writer is not None else ():
            self._writer.write({"step": step, "dataset": name, **one})
        return results

    def _note_non_finite(self, name: str, rows: slice) -> None:
        """Says which batch's numbers are not finite; reads the data again up to the first."""
        batches = self._pipelines[name].batches(rows=rows)
        for index, inputs in enumerate(itertools.islice(batches, self._max_eval_batches)):
            if found := non_finite_rows(inputs, rows.start):
                self._note(f"datasets.{name}: batch {index} (counted from 0) has {found}")
                return


def _add(
    mean: WeightedMean,
    records: list[dict[str, Any]],
    metrics: WeightedScalars,
    outputs: Mapping[str, Any] | None = None,
    is_true_row: Any = None,
) -> None:
    mean.add(metrics)
    if outputs:
        records += records_of(outputs, is_true_row)


def watched_values(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns an evaluation's metrics as settings name them: `heldout/loss`."""
    return {f"{name}/{n}": value for name, one in results.items() for n, value in one.items()}


def evaluation_line(step: int, dataset: str, results: Mapping[str, float]) -> str:
    """Returns an evaluation as a line to read."""
    words = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    words = words or "no metrics, for no row weighs anything"
    return f"step {step}  {dataset}: {words}"
