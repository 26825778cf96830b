"""Means of a task's metrics over datasets: when and over what they are taken, and their lines."""

from collections.abc import Mapping
from typing import Any

import jax

from praxis_lite.inputs import InputPipeline
from praxis_lite.metrics import JsonLinesWriter, WeightedMean
from praxis_lite.partitioner import Partitioner


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


def watched_values(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns an evaluation's metrics as settings name them: `heldout/loss`."""
    return {f"{name}/{n}": value for name, one in results.items() for n, value in one.items()}


def evaluation_line(step: int, dataset: str, results: Mapping[str, float]) -> str:
    """Returns an evaluation as a line to read."""
    words = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    return f"step {step}  {dataset}: {words}"


def host_of() -> dict[str, int]:
    """Returns which host's rows a pipeline gives here."""
    return {"host_index": jax.process_index(), "num_hosts": jax.process_count()}
