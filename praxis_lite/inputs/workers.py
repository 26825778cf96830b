"""Prefetches batches in worker processes or threads, and returns them in order."""

import atexit
import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.inputs.base import IndexedPipeline
from praxis_lite.inputs.processes.worker_process import WorkerProcess, strided_range

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(eq=False)
class WithWorkers(IndexedPipeline):
    """Prefetches the batches of another pipeline, unchanged and in order.

    Worker w of N computes batches start + w, start + w + N, ... Each batch is a pure function of
    its index, so a job can resume with a different number or kind of workers; the fingerprint
    includes neither the number nor the kind. Each call of `batches` starts new workers, so use this
    class for training, not for short evaluations. If a worker fails or is killed, requesting its
    next batch raises an error.

    A worker process is a new Python process with a copy of the pipeline and its data. Starting a
    worker process takes 0.3 s and 30 MB, plus the imports of the pipeline's module. A worker
    process cannot use accelerators, ignores SIGINT and SIGTERM, which the training process handles,
    and exits together with the training process. Threads have none of these costs, but they only
    help while the GIL is released: when reading files, and during large NumPy operations.

    Args:
        pipeline: Pipeline to prefetch. With processes, it must be picklable and thus contain no
            lambdas.
        num_workers: Number of workers.
        num_prefetched: Maximum number of finished batches waiting in each worker's queue.
        kind: "processes" or "threads".
    """

    pipeline: IndexedPipeline
    num_workers: int = 2
    num_prefetched: int = 2
    kind: Literal["processes", "threads"] = "processes"

    @property
    def batch_size(self) -> int:  # type: ignore[override]  # Read-only property.
        return self.pipeline.batch_size

    @property
    def num_batches(self) -> int | None:
        return self.pipeline.num_batches

    def check(self) -> None:
        if not isinstance(self.pipeline, IndexedPipeline):
            raise ConfigError(
                f"WithWorkers: pipeline is a {type(self.pipeline).__name__}, which has no random "
                "access; expected an IndexedPipeline. Remove WithWorkers (tf.data runs in parallel "
                "with num_parallel_calls), or implement the pipeline as an IndexedPipeline."
            )
        self.require_at_least(1, "num_workers", "num_prefetched")
        require_choice("WithWorkers.kind", self.kind, ("processes", "threads"))
        self.pipeline.check()

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return self.pipeline.element_spec()

    def element_specs(self) -> "tuple[dict[str, jax.ShapeDtypeStruct], ...]":
        return self.pipeline.element_specs()

    def num_rows(self, index: int) -> int:
        return self.pipeline.num_rows(index)

    def example_of(self, index: int, row: int) -> str:
        return self.pipeline.example_of(index, row)

    def baselines(self) -> dict[str, float]:
        return self.pipeline.baselines()

    def classes(self) -> dict[str, tuple[str, ...]]:
        return self.pipeline.classes()

    def fingerprint(self) -> dict[str, Any]:
        return self.pipeline.fingerprint()

    def nondeterminism(self) -> str | None:
        return self.pipeline.nondeterminism()

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        return self.pipeline.rows(index, rows)

    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        self.check()
        batches = self._from_processes if self.kind == "processes" else self._from_threads
        return batches(start, self.rows_or_all(rows))

    def _from_threads(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        num_ahead = self.num_workers * (1 + self.num_prefetched)
        executor = concurrent.futures.ThreadPoolExecutor(self.num_workers, "batches")
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        try:
            # A limited number of batches are computed ahead, and returned in order.
            for index in strided_range(start, 1, self.num_batches):
                pending.append(executor.submit(self.rows, index, rows))
                if len(pending) > num_ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def _from_processes(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        workers: list[WorkerProcess] = []

        def stop() -> None:
            while workers:
                workers.pop().kill()

        # Python waits for child processes at exit. A traceback can keep this generator alive until
        # then, so that its `finally` would run too late.
        atexit.register(stop)
        try:
            for number in range(self.num_workers):
                name = f"worker {number} of {self.num_workers}"
                workers.append(WorkerProcess(name, self.num_prefetched))
            for number, worker in enumerate(workers):
                indices = (start + number, self.num_workers, self.num_batches)
                worker.start(self.pipeline, indices, rows)
            for index in strided_range(start, 1, self.num_batches):
                yield workers[(index - start) % self.num_workers].batch(index)
        finally:
            stop()
            atexit.unregister(stop)
