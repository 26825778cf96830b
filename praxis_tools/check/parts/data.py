"""Provides the batches of a check, and checks that datasets are reproducible."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import InputPipeline
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.runs.on_mesh import Batch, structs
from praxis_tools.check.tolerances import exact

# Candidate batch sizes. The first sizes are small, divisible by 4 (for microbatches), and not
# divisible by 8 (the number of devices), so that batches need padding rows.
ROWS = (20, 12, 28, 24, 16, 40, 32, 48, 64, 128)
# Number of batches to search for batches of other shapes.
_NUM_SEARCHED = 100


def first_batches(pipeline: InputPipeline, num_batches: int) -> list[dict[str, np.ndarray]]:
    """Returns the first `same_shaped` batches, repeating them if there are too few."""
    batches = list(itertools.islice(same_shaped(pipeline), num_batches))
    return [batches[i % len(batches)] for i in range(num_batches)] if batches else []


def same_shaped(pipeline: InputPipeline) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of a pipeline that have the same shapes as its first batch."""
    first: dict[str, Any] | None = None
    for batch in pipeline.batches():
        arrays = {name: np.asarray(x) for name, x in batch.items()}
        first = first or structs(arrays)
        if structs(arrays) == first:
            yield arrays


def first_batch_of_each_shape(pipeline: InputPipeline) -> list[dict[str, np.ndarray]]:
    """Returns the first batch of each shape among the first batches of a pipeline."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for batch in itertools.islice(pipeline.batches(), _NUM_SEARCHED):
        arrays = {name: np.asarray(x) for name, x in batch.items()}
        found.setdefault(str(structs(arrays)), arrays)
        if len(found) == len(pipeline.element_specs()):
            break
    return list(found.values())


def with_rows(batch: Batch, rows: slice) -> dict[str, np.ndarray]:
    """Returns a slice of the rows of a batch."""
    return {name: x[rows] if x.ndim else x for name, x in batch.items()}


def fold_ids(batch: Batch, num_ids: Mapping[str, int]) -> tuple[dict[str, np.ndarray], str]:
    """Replaces ids beyond the model's number of ids by their remainders modulo this number.

    Args:
      batch: The batch.
      num_ids: Maps the name of each array of ids to the model's number of ids, from `Task.num_ids`.

    Returns:
      The new batch, and the names of the changed arrays, joined by commas.
    """
    folded, names = dict(batch), []
    for name, count in num_ids.items():
        if name in folded and np.any(folded[name] >= count):
            folded[name] = folded[name] % count
            names.append(name)
    return folded, ", ".join(names)


def num_rows_to_check(partitioners: list[Partitioner], batch: Batch, batch_size: int) -> int:
    """Returns the first number of rows in `ROWS` that all partitioners support.

    Raises:
      ConfigError: A partitioner does not even support batches with all rows.
    """

    def check(num_rows: int) -> None:
        spec = structs(with_rows(batch, slice(num_rows)))
        for partitioner in partitioners:
            partitioner.train_step.check_batch(spec)
            partitioner.train_step.trace(spec)

    for num_rows in (n for n in ROWS if n < batch_size):
        with contextlib.suppress(ConfigError):
            check(num_rows)
            return num_rows
    check(batch_size)
    return batch_size


def compare_repeated(job: Job) -> list[Comparison]:
    """Checks that datasets return the same batches each time they are read.

    Each dataset is read twice from the start, once from a later batch, and once in blocks of rows.
    """
    comparisons = []
    for root in ("datasets", "decode_datasets"):
        for name, pipeline in getattr(job, root).items():
            once = list(itertools.islice(pipeline.batches(), 3))
            again = list(itertools.islice(pipeline.batches(), 3))
            comparisons += _compare_batches(f"{root}.{name}, read twice", once, again)
            start = min(1, len(once) - 1)
            later = list(itertools.islice(pipeline.batches(start=start), 3 - start))
            comparisons += _compare_batches(
                f"{root}.{name}, from batch {start}", once[start:], later[: len(once) - start]
            )
            middle = max(1, pipeline.batch_size // 3)
            blocks = [
                next(pipeline.batches(rows=rows))
                for rows in (slice(0, middle), slice(middle, pipeline.batch_size))
                if rows.start < rows.stop
            ]
            joined = {
                key: np.concatenate([block[key] for block in blocks])
                if np.ndim(blocks[0][key])
                else blocks[0][key]
                for key in blocks[0]
            }
            comparisons += _compare_batches(f"{root}.{name}, in blocks of rows", once[:1], [joined])
    return comparisons


def _compare_batches(name: str, expected: list[Batch], actual: list[Batch]) -> list[Comparison]:
    def leaves(batches: list[Batch]) -> dict[str, np.ndarray]:
        return {
            f"{name}: batch {i}, {key}": np.asarray(x)
            for i, batch in enumerate(batches)
            for key, x in batch.items()
        }

    return exact("one host", "data", leaves(expected), leaves(actual))
