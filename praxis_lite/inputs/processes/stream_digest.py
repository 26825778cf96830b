"""A digest of a pipeline's global batches, as several processes make them together."""

import contextlib
from collections.abc import Iterator

import numpy as np

from praxis_lite.core.errors import require
from praxis_lite.inputs.base import IndexedPipeline, InputPipeline, digest_of
from praxis_lite.inputs.processes.worker_process import WorkerProcess

_NUM_PREFETCHED = 2


def stream_digest(
    pipeline: InputPipeline, num_batches: int, *, start: int = 0, num_processes: int = 1
) -> str:
    """Returns the SHA-256, in hex, of the names, types, shapes and bytes of whole batches.

    Each process makes its rows alone, as each host of a job does: the first ones the first rows, as
    many as go into each but the last. For a pipeline that gives its batches only in order they are
    made one after the other in this process.

    Raises:
      ConfigError: the pipeline is wrong, or ends before.
    """
    is_number = 1 <= num_batches < 2**31
    require(is_number, "The number of batches", num_batches, "1 or more, below 2**31")
    require(num_processes >= 1, "The number of processes", num_processes, "1 or more")
    require(0 <= start < 2**31, "The first batch", start, "0 or more, below 2**31")
    pipeline.check()
    if pipeline.num_batches is not None:
        require(
            start + num_batches <= pipeline.num_batches, "The last batch", start + num_batches - 1,
            f"at most {pipeline.num_batches - 1}, for one pass has {pipeline.num_batches} batches",
        )
    each = -(-pipeline.batch_size // num_processes)
    edges = [min(pipeline.batch_size, each * k) for k in range(num_processes + 1)]
    parts = [slice(edges[k], edges[k + 1]) for k in range(num_processes)]
    return digest_of(
        {name: np.concatenate([item[name] for item in result]) for name in result[0]}
        for result in _made(pipeline, num_batches, start, parts)
    )


def _made(
    pipeline: InputPipeline, num_batches: int, start: int, parts: list[slice]
) -> Iterator[list[dict[str, np.ndarray]]]:
    """Yields each batch as the parts that its processes made."""
    if not isinstance(pipeline, IndexedPipeline):
        streams = [pipeline.batches(start, rows=rows) for rows in parts]
        for _ in range(num_batches):
            yield [next(stream) for stream in streams]
        return
    with contextlib.ExitStack() as stack:
        workers = []
        for number, rows in enumerate(parts):
            worker = WorkerProcess(f"process {number} of {len(parts)}", _NUM_PREFETCHED)
            stack.callback(worker.kill)
            worker.begin(pipeline, (start, 1, start + num_batches), rows)
            workers.append(worker)
        for index in range(start, start + num_batches):
            yield [worker.batch(index) for worker in workers]
