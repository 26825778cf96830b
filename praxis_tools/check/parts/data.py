"""The batches that a check trains on, and whether a pipeline gives the same twice."""

import contextlib
import itertools
from collections.abc import Mapping

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import InputPipeline
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.runs.on_mesh import Batch, structs
from praxis_tools.check.tolerances import exact

# Few rows, which divide by 4 micro-batches and not by 3 or 8 devices, if the task takes them.
ROWS = (20, 12, 28, 24, 16, 40, 32, 48, 64, 128)


def first_batches(pipeline: InputPipeline, number: int) -> list[dict[str, np.ndarray]]:
    """Returns the first batches; those of a short pass come again."""
    result = [
        {name: np.asarray(x) for name, x in batch.items()}
        for batch in itertools.islice(pipeline.batches(), number)
    ]
    return [result[i % len(result)] for i in range(number)] if result else []


def with_rows(batch: Batch, rows: slice) -> dict[str, np.ndarray]:
    """Returns some rows of a batch."""
    return {name: x[rows] if x.ndim else x for name, x in batch.items()}


def folded(batch: Batch, num_ids: Mapping[str, int]) -> tuple[dict[str, np.ndarray], str]:
    """Returns a batch with ids modulo how many there are, and which leaves that changed.

    Args:
      num_ids: as of `Task.num_ids`.
    """
    result, names = dict(batch), []
    for name, number in num_ids.items():
        if name in result and np.any(result[name] >= number):
            result[name] = result[name] % number
            names.append(name)
    return result, ", ".join(names)


def num_rows_to_check(partitioners: list[Partitioner], batch: Batch, batch_size: int) -> int:
    """Returns how many rows of each batch are enough, and are taken by these partitioners.

    Raises:
      ConfigError: the partitioners refuse the batches as they are.
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


def repeatable(job: Job) -> list[Comparison]:
    """Returns whether each dataset repeats itself: from the start, from a later batch, by rows."""
    result = []
    for root in ("datasets", "decode_datasets"):
        for name, pipeline in getattr(job, root).items():
            once = list(itertools.islice(pipeline.batches(), 3))
            again = list(itertools.islice(pipeline.batches(), 3))
            result += _compared(f"{root}.{name}, made twice", once, again)
            start = min(1, len(once) - 1)
            later = list(itertools.islice(pipeline.batches(start=start), 3 - start))
            result += _compared(
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
                if np.ndim(blocks[0][key]) else blocks[0][key]
                for key in blocks[0]
            }
            result += _compared(f"{root}.{name}, by rows", once[:1], [joined])
    return result


def _compared(name: str, expected: list[Batch], actual: list[Batch]) -> list[Comparison]:
    def leaves(batches: list[Batch]) -> dict[str, np.ndarray]:
        return {
            f"{name}: batch {i}, {key}": np.asarray(x)
            for i, batch in enumerate(batches) for key, x in batch.items()
        }

    return exact("one host", "data", leaves(expected), leaves(actual))
