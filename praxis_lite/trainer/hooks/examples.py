"""The hook that records which rows each process trained on, to verify the order of the data."""

import socket
import time
from collections.abc import Sequence

import jax
import numpy as np

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.host.atomic_files import not_written
from praxis_lite.host.file_reading import finish_last_line
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.processes.row_digests import (
    fingerprint_digest,
    row_digests,
    total,
)
from praxis_lite.job import processes
from praxis_lite.job.events import events
from praxis_lite.job.examples.lines import RowSpan, Start, line_of, next_start
from praxis_lite.job.processes.broadcast import from_first
from praxis_lite.job.processes.same_everywhere import versions
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.retrying_line_writer import RetryingLineWriter


class Examples(Hook):
    """Before each save, records the rows that this process has trained on since the last save.

    Each record is a line, and every step from which training may resume is the last step in a line.
    The line is written by `to_save`, which every process calls before each save, after reading the
    step's metrics.
    """

    every, waits = None, False
    # The rows trained on since the last line.
    _sum: int
    _steps: list[int]
    _batches: list[int]

    def __init__(self, job: JobOnMesh):
        self._job = job
        self._lines: RetryingLineWriter | None = None

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        folder, membership = self._job.files.examples, processes.membership()
        member = processes.index() if membership is None else membership.member
        self._path = folder / f"{member}.jsonl"
        self._number, launch = from_first(
            "start of examples", lambda: (next_start(folder), events.began)
        )
        train, mesh = self._job.datasets[TRAIN], self._job.partitioner.mesh
        # Several processes may feed the same row. Count each row only in the process of one device.
        is_local = [device.process_index == jax.process_index() for device in mesh.devices.flat]
        is_own = np.repeat(is_local, -(-train.batch_size // mesh.size))[: train.batch_size]
        self._is_own = is_own[self._job.partitioner.process_rows(train.batch_size)]
        self._start = Start(
            start=self._number,
            step=loop.first_step,
            is_new=not loop.is_resumed,
            time=time.time(),
            launch=launch,
            generation=None if membership is None else membership.generation,
            process=processes.index(),
            num_processes=processes.count(),
            host=socket.gethostname(),
            mesh=dict(mesh.shape),
            batch_size=train.batch_size,
            rows=_ranges(is_own),
            skipped=loop.skipped_batches,
            data=fingerprint_digest(train),
            versions=versions(),
        )
        try:
            folder.mkdir(exist_ok=True)
            self._lines = RetryingLineWriter(self._path)
            # A process that was killed may have left an incomplete line.
            with self._path.open("r+b") as file:
                finish_last_line(file)
        except OSError as error:
            raise not_written(self._path, error) from error
        self._write(loop.first_step, line_of(self._start))
        self._reset()

    def after_metrics(self, metrics: StepMetrics) -> None:
        digests = row_digests(metrics.inputs, metrics.batch_index, metrics.first_row)
        # A batch may have a multiple of batch_size rows.
        is_own = np.repeat(self._is_own, len(digests) // max(1, len(self._is_own)))
        self._sum = (self._sum + total(digests[is_own])) % 2**64
        self._steps.append(metrics.step)
        self._batches.append(metrics.batch_index)

    def to_save(self) -> None:
        if not self._steps:
            return
        first, last, fed = self._batches[0], self._batches[-1], set(self._batches)
        span = RowSpan(
            start=self._number,
            process=processes.index(),
            steps=(self._steps[0], self._steps[-1]),
            batches=(first, last),
            skipped=tuple(index for index in range(first, last + 1) if index not in fed),
            digest=f"{self._sum:016x}",
        )
        self._write(span.steps[1], line_of(span))
        self._reset()

    def __exit__(self, *exc_info: object) -> None:
        if self._lines is not None:
            self._lines.close(raise_on_loss=False)
            self._lines = None

    def _reset(self) -> None:
        self._sum = 0
        self._steps, self._batches = [], []

    def _write(self, step: int, text: str) -> None:
        """Appends a line and syncs it to disk, so that the line survives a host crash."""
        assert self._lines is not None, "`before_training` was called."
        self._lines.add(step, text)
        self._lines.sync()


def _ranges(is_own: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Returns the (start, end) ranges of indices at which a mask is True."""
    edges: Sequence[int] = np.flatnonzero(np.diff(is_own, prepend=False, append=False)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
