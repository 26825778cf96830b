"""The record of the rows that each process fed, by which a run proves its examples."""

import contextlib
import os
import socket
import time
from collections.abc import Sequence

import jax
import numpy as np

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.host.whole_files import not_written
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.processes.row_digests import (
    fingerprint_digest,
    row_digests,
    total,
)
from praxis_lite.job import processes
from praxis_lite.job.events import events
from praxis_lite.job.examples.lines import Start, Stretch, line_of, next_start
from praxis_lite.job.processes.broadcast import from_first
from praxis_lite.job.processes.same_everywhere import versions
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.kept_lines import KeptLines


class Examples(Hook):
    """Writes a line of the rows that this process fed since the last save, before each save.

    So the record has every stretch that a restore may start from. What a save keeps is asked for
    (`to_save`) before it begins, on every process, and once the metrics of its step were read.
    """

    every, waits = None, False

    def __init__(self, job: JobOnMesh):
        self._job, self._lines = job, None

    def before_training(self, loop: Loop, state: TrainState) -> None:
        folder, part = self._job.files.examples, processes.membership()
        member = processes.index() if part is None else part.member
        self._path = folder / f"{member}.jsonl"
        self._number, launch = from_first(
            "start of examples", lambda: (next_start(folder), events.began)
        )
        train, mesh = self._job.datasets[TRAIN], self._job.partitioner.mesh
        fed = [item.process_index == jax.process_index() for item in mesh.devices.flat]
        is_own = np.repeat(fed, -(-train.batch_size // mesh.size))[: train.batch_size]
        self._own = is_own[self._job.partitioner.process_rows(train.batch_size)]
        self._start = Start(
            start=self._number, step=loop.first_step,
            is_new=not loop.is_resumed, time=time.time(), launch=launch,
            generation=part and part.generation, process=processes.index(),
            num_processes=processes.count(), host=socket.gethostname(), mesh=dict(mesh.shape),
            batch_size=train.batch_size, rows=_ranges(is_own), skipped=loop.skipped_batches,
            data=fingerprint_digest(train), versions=versions(),
        )
        try:
            folder.mkdir(exist_ok=True)
            self._lines = KeptLines(self._path, loop.note)
            is_torn = _ends_within_a_line(self._path)
        except OSError as error:
            raise not_written(self._path, error) from error
        self._write(loop.first_step, "\n" * is_torn + line_of(self._start))
        self._begin()

    def after_metrics(self, metrics: StepMetrics) -> None:
        digests = row_digests(metrics.inputs, metrics.batch, metrics.first_row)
        self._sum = (self._sum + total(digests[self._own])) % 2**64
        self._steps.append(metrics.step)
        self._batches.append(metrics.batch)

    def to_save(self) -> None:
        if not self._steps:
            return
        first, last, fed = self._batches[0], self._batches[-1], set(self._batches)
        stretch = Stretch(
            start=self._number, process=processes.index(),
            steps=(self._steps[0], self._steps[-1]), batches=(first, last),
            skipped=tuple(item for item in range(first, last + 1) if item not in fed),
            digest=f"{self._sum:016x}",
        )
        self._write(stretch.steps[1], line_of(stretch))
        self._begin()

    def __exit__(self, *exc_info: object) -> None:
        if self._lines is not None:
            self._lines.close(is_last_word=False)
            self._lines = None

    def _begin(self) -> None:
        self._sum, self._steps, self._batches = 0, [], []

    def _write(self, step: int, text: str) -> None:
        """Adds a line, and waits until it is on disk: a host that dies leaves it."""
        self._lines.add(step, text)
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)


def _ranges(is_own: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Returns the ranges in which an array is True."""
    edges: Sequence[int] = np.flatnonzero(np.diff(is_own, prepend=False, append=False)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _ends_within_a_line(path: os.PathLike) -> bool:
    content_end = os.path.getsize(path) - 1
    with open(path, "rb") as file:
        file.seek(max(content_end, 0))
        return file.read(1) not in (b"", b"\n")
