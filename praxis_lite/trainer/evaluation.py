"""Means of a task's metrics over datasets, and the lines that report them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.batch_sharding import check_ids, global_batch
from praxis_lite.core.task import records_of
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.batches import checked_batches, non_finite_rows
from praxis_lite.inputs.numpy_data import InMemory
from praxis_lite.job.events import COMPILE, DISPATCH, ON_DEVICES, events
from praxis_lite.trainer.checks.id_sizes import num_ids_of
from praxis_lite.trainer.compilation import compile_step, compile_together
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.json_lines import append_lines
from praxis_lite.trainer.metrics.packed import Packed, packed
from praxis_lite.trainer.metrics.progress import metric_text
from praxis_lite.trainer.metrics.records import write_records
from praxis_lite.trainer.metrics.weighted import WeightedMean
from praxis_lite.trainer.restored_weights import restored_weights

Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Means of a task's metrics over a pass of datasets, or `max_eval_batches` of it.

    Attributes:
      note: prints a line, on NaN in a dataset whose metrics are not finite.
      seed: of the keys with which a task may draw (`Task.compute_eval_loss`).
    """

    partitioner: Partitioner
    pipelines: Mapping[str, InputPipeline]
    max_eval_batches: int | None
    note: Callable[[str], None] = print
    seed: int = dataclasses.field(default=0, kw_only=True)

    def run(
        self,
        step: int,
        mdl_vars: Any,
        should_stop: Callable[[], bool] = lambda: False,
        examples: dict[str, list[dict[str, Any]]] | None = None,
    ) -> dict[str, dict[str, float]] | None:
        """Returns metrics by dataset, weighted over all batches.

        Args:
          step: of the weights.
          should_stop: asked before each batch. If it returns True, None is returned.
          examples: filled, by dataset, with the task's per-example outputs: a record for each row
            that is not padding. None: they are not computed.

        Raises:
          ConfigError: a batch has ids that the model has no row for.
        """
        results, partitioner = {}, self.partitioner
        run = partitioner.eval_step if examples is None else partitioner.eval_examples
        for name, pipeline in self.pipelines.items():
            num_ids = num_ids_of(partitioner.task, pipeline.element_spec())
            mean, pending, records = WeightedMean(), None, []
            num_rows = pipeline.batch_size
            rows = partitioner.process_rows(num_rows)
            for index, inputs in checked_batches(pipeline, f"datasets.{name}", rows=rows):
                if index == self.max_eval_batches:
                    break
                if should_stop():
                    return None
                where = f"datasets.{name}, batch {index}"
                check_ids(inputs, num_ids, where, first_row=rows.start)
                if index == 0:
                    with events.phase(COMPILE):
                        compile_step(run, pipeline, f"datasets.{name}")
                batch = global_batch(inputs, partitioner.mesh, num_rows)
                key = partitioner.batch_key(self.seed, step, index)
                with events.phase(DISPATCH):
                    outputs = run(mdl_vars, batch, key)
                metrics, *row_outputs = (outputs,) if examples is None else outputs
                if pending is not None:
                    _add(mean, records, *pending)
                pending = packed(metrics), row_outputs
            if pending is not None:
                _add(mean, records, *pending)
            if examples is not None and records:
                examples[name] = records
            results[name] = {**mean.result(), **pipeline.baselines()}
            if not all(map(math.isfinite, mean.result().values())):
                self._note_non_finite(name, rows)
        return results

    def _note_non_finite(self, name: str, rows: slice) -> None:
        """Notes the first batch whose numbers are not finite; reads the data again up to it."""
        batches = self.pipelines[name].batches(rows=rows)
        for index, inputs in enumerate(itertools.islice(batches, self.max_eval_batches)):
            found = functools.partial(self.pipelines[name].example_of, index)
            if result := non_finite_rows(inputs, rows.start, found):
                self.note(f"datasets.{name}: batch {index} (counted from 0) has {result}")
                return


def _add(
    mean: WeightedMean, records: list[dict[str, Any]], metrics: Packed, row_outputs: list[Any]
) -> None:
    """Waits for the outputs of a batch, and adds its metrics and a record for each real row.

    Args:
      row_outputs: per-example outputs, and which rows are real; [] if they are not collected.
    """
    with events.phase(ON_DEVICES):
        scalars, row_outputs = metrics.on_host(), jax.device_get(row_outputs)
    mean.add(scalars)
    if row_outputs and row_outputs[0]:
        records += records_of(*row_outputs)


def evaluate(job: JobOnMesh, step: int | str | None) -> None:
    """Evaluates a checkpoint ("best"; None: the newest) on every dataset but `train`."""
    partitioner, run = job.partitioner, job.run
    if not job.eval_sets:
        raise ConfigError(
            "The experiment has no dataset to evaluate on: 'train' is the only one. Add another to "
            'its datasets(), for instance: "heldout": fdl.Config(TextWindows, ..., shuffle=False).'
        )
    compile_together(
        (partitioner.eval_examples, pipeline, f"datasets.{name}")
        for name, pipeline in job.eval_sets.items()
    )
    step, mdl_vars = restored_weights(partitioner, job.files, step, run.evaluation.use_ema_states)
    evaluator = Evaluator(partitioner, job.eval_sets, run.evaluation.max_batches, seed=run.seed)
    examples: dict[str, list[dict[str, Any]]] = {}
    results = evaluator.run(step, mdl_vars, examples=examples)
    append_lines(
        job.files.eval_metrics_jsonl,
        [{"step": step, "dataset": name, **metrics} for name, metrics in results.items()],
    )
    for name, metrics in results.items():
        print(evaluation_line(step, name, metrics))
    for name, records in examples.items():
        path = job.files.eval_jsonl(name, step)
        write_records(path, records, print)
        count = "1 example" if len(records) == 1 else f"{len(records)} examples"
        print(f"evaluated {count} of {name} with the weights of step {step}: {path}")


def watched_values(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns an evaluation's metrics as settings name them: `heldout/loss`."""
    return {f"{name}/{n}": value for name, result in results.items() for n, value in result.items()}


def evaluation_line(step: int, dataset: str, results: Mapping[str, float]) -> str:
    """Returns an evaluation as a line to read."""
    words = "  ".join(f"{name} {metric_text(value)}" for name, value in results.items())
    words = words or "no metrics, for no row weighs anything"
    return f"step {step}  {dataset}: {words}"


def in_memory(data: Batch | Iterable[Batch]) -> InMemory:
    """Returns a pipeline of the rows of all batches, as many at a time as the largest has.

    Raises:
      ConfigError: there are no batches, or they do not fit together.
    """
    batches = [data] if isinstance(data, Mapping) else list(data)
    for batch in batches:
        if not isinstance(batch, Mapping) or batch.keys() != batches[0].keys():
            result = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ConfigError(
                f"evaluate was given a batch of {result}; give NumPy arrays by name, the same "
                "names in every batch."
            )
    if not batches:
        raise ConfigError("evaluate was given 0 batches. Give it one at least.")
    arrays = {name: [np.asarray(batch[name]) for batch in batches] for name in batches[0]}
    most_rows = max((len(x) for xs in arrays.values() for x in xs if x.ndim), default=1)
    try:
        joined = {name: np.concatenate(xs) if xs[0].ndim else xs[0] for name, xs in arrays.items()}
    except ValueError as error:
        raise ConfigError(f"evaluate was given batches that do not fit: {error}.") from None
    return InMemory(joined, batch_size=max(most_rows, 1), shuffle=False)
