"""Finds the collective in which other processes wait for a stuck process."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from praxis_lite.core.errors import format_bytes
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.trainer.hooks.hook import Hook
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_tools.explain.hlo import Collective, collectives
from praxis_tools.explain.hlo_text import text_of
from praxis_tools.stuck.progress import progress_recorder

# Maximum size of the HLO text. Parsing takes seconds, during which no heartbeats are sent.
_MAX_TEXT_BYTES = 2**24


class ReportFirstCollectives(Hook):
    """Finds the training step's first collectives for reports on stuck processes.

    The compiled step is only parsed if such a report is created.
    """

    every, waits = None, False

    def __init__(self, job: JobOnMesh):
        self._job = job

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        if processes.count() > 1:
            partitioner = self._job.partitioner
            # Compile in the training thread, so that the first step can reuse the executable.
            step = partitioner.train_step.lower(self._job.datasets[TRAIN].element_spec()).compile()
            mesh = partitioner.mesh
            owners = [device.process_index for device in mesh.devices.flat]
            progress_recorder.first_collective = FirstCollectives(step, dict(mesh.shape), owners)


class FirstCollectives:
    """Finds the first collective in a program that involves a given process's devices.

    The program is parsed on the first call, which may be in any thread.

    Args:
      compiled: The program or its text.
      axis_sizes: Number of devices along each mesh axis.
      owners: Process index of each device, in the mesh's row-major order.
    """

    def __init__(
        self,
        compiled: "jax.stages.Compiled | str",
        axis_sizes: Mapping[str, int],
        owners: Sequence[int],
    ):
        self._compiled, self._axis_sizes, self._owners = compiled, axis_sizes, np.array(owners)
        self._descriptions: dict[int, str] | None = None
        self._lock = threading.Lock()

    def __call__(self, process: int) -> str:
        """Returns a description of the collective, or "" if it cannot be found."""
        with self._lock:
            if self._descriptions is None:
                # The report must be printed even if the program cannot be parsed.
                self._descriptions = {}
                with contextlib.suppress(Exception):
                    self._descriptions = self._read()
        return self._descriptions.get(process, "")

    def _read(self) -> dict[int, str]:
        text = self._compiled if isinstance(self._compiled, str) else text_of(self._compiled)
        descriptions: dict[int, str] = {}
        if len(text) > _MAX_TEXT_BYTES:
            return descriptions
        missing = set(self._owners.tolist())
        for collective in collectives(text, self._axis_sizes):
            if collective.groups is None or not missing:
                continue
            for group in collective.groups:
                members = set(self._owners[group].tolist())
                if len(members) > 1:  # Otherwise, no process waits for another process.
                    for process in members & missing:
                        descriptions[process] = _description(collective)
                    missing -= members
        return descriptions


def _description(collective: Collective) -> str:
    layer = collective.layer
    over = f" over {' and '.join(collective.axes)}" if collective.axes else ""
    is_path = " " not in layer and ".py:" not in layer
    where = f", in {'layer ' * is_path}{layer}" if layer != "unknown" else ""
    return f"{collective.kind} of {format_bytes(collective.bytes)}{over}{where}"
