"""Computes a digest of a pipeline's global batches, using several processes."""

import contextlib
from collections.abc import Iterator

import numpy as np

from praxis_lite.core.errors import require
from praxis_lite.inputs.base import IndexedPipeline, InputPipeline, batches_sha256
from praxis_lite.inputs.processes.worker_process import WorkerProcess

_NUM_PREFETCHED = 2


def stream_digest(
    pipeline: InputPipeline, num_batches: int, *, start: int = 0, num_processes: int = 1
) -> str:
    """Returns the hex SHA-256 of the names, dtypes, shapes and bytes of global batches.

    Each process computes a contiguous range of the rows, like each host in a job. A pipeline
    without random access computes all ranges in the current process.

    Args:
      pipeline: Pipeline that computes the batches.
      num_batches: Number of batches to hash.
      start: Index of the first batch.
      num_processes: Number of processes that compute the rows. If batch_size is not divisible by
        this number, the last processes compute fewer rows or none.

    Raises:
      ConfigError: The pipeline's settings are invalid, or the pipeline ends too early.
    """
    is_in_range = 1 <= num_batches < 2**31
    require(is_in_range, "The number of batches", num_batches, "at least 1 and below 2**31")
    require(num_processes >= 1, "The number of processes", num_processes, "at least 1")
    require(0 <= start < 2**31, "The first batch", start, "at least 0 and below 2**31")
    pipeline.check()
    if pipeline.num_batches is not None:
        require(
            start + num_batches <= pipeline.num_batches,
            "The last batch",
            start + num_batches - 1,
            f"at most {pipeline.num_batches - 1}, the last of {pipeline.num_batches} batches",
        )
    rows_per_process = -(-pipeline.batch_size // num_processes)
    edges = [min(pipeline.batch_size, rows_per_process * k) for k in range(num_processes + 1)]
    row_slices = [slice(edges[k], edges[k + 1]) for k in range(num_processes)]
    return batches_sha256(
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for parts in _batch_parts(pipeline, num_batches, start, row_slices)
    )


def _batch_parts(
    pipeline: InputPipeline, num_batches: int, start: int, row_slices: list[slice]
) -> Iterator[list[dict[str, np.ndarray]]]:
    """Yields, for each batch, the rows in every slice."""
    if not isinstance(pipeline, IndexedPipeline):
        streams = [pipeline.batches(start, rows=rows) for rows in row_slices]
        for _ in range(num_batches):
            yield [next(stream) for stream in streams]
        return
    with contextlib.ExitStack() as stack:
        workers = []
        for number, rows in enumerate(row_slices):
            worker = WorkerProcess(f"process {number} of {len(row_slices)}", _NUM_PREFETCHED)
            stack.callback(worker.kill)
            worker.start(pipeline, (start, 1, start + num_batches), rows)
            workers.append(worker)
        for index in range(start, start + num_batches):
            yield [worker.batch(index) for worker in workers]
