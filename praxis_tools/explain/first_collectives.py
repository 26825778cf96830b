"""For reports on stuck processes: the collective in which the others wait for one."""

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
from praxis_tools.stuck.progress import own

# Larger texts take too many seconds to parse: the thread that asks sends no heartbeats meanwhile.
_MAX_TEXT_BYTES = 2**24


class ReportFirstCollectives(Hook):
    """Lets reports on stuck processes name the collective that waits; reads no program before."""

    every, waits = None, False

    def __init__(self, job: JobOnMesh):
        self._job = job

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        if processes.count() > 1:
            partitioner = self._job.partitioner
            # Compile here, in the loop's thread, whose first step then finds it compiled.
            step = partitioner.train_step.lower(self._job.datasets[TRAIN].element_spec()).compile()
            mesh = partitioner.mesh
            owners = [device.process_index for device in mesh.devices.flat]
            own.first_collective = FirstCollectives(step, dict(mesh.shape), owners)


class FirstCollectives:
    """For each process index, the first collective of a program that needs its devices.

    The program is read on the first call, from any thread.

    Args:
      compiled: the program, or its text.
      axis_sizes: devices along each mesh axis.
      owners: the process of each device, in the mesh's row-major order.
    """

    def __init__(
        self, compiled: "jax.stages.Compiled | str", axis_sizes: Mapping[str, int],
        owners: Sequence[int],
    ):
        self._compiled, self._axis_sizes, self._owners = compiled, axis_sizes, np.array(owners)
        self._descriptions: dict[int, str] | None = None
        self._lock = threading.Lock()

    def __call__(self, process: int) -> str:
        """Describes the collective; "" if there is none or the program cannot be read."""
        with self._lock:
            if self._descriptions is None:
                # An unreadable program must not keep the report from being printed.
                self._descriptions = {}
                with contextlib.suppress(Exception):
                    self._descriptions = self._read()
        return self._descriptions.get(process, "")

    def _read(self) -> dict[int, str]:
        text = self._compiled if isinstance(self._compiled, str) else self._compiled.as_text()
        descriptions: dict[int, str] = {}
        if len(text) > _MAX_TEXT_BYTES:
            return descriptions
        missing = set(self._owners.tolist())
        for collective in collectives(text, self._axis_sizes):
            if collective.groups is None or not missing:
                continue
            for group in collective.groups:
                members = set(self._owners[group].tolist())
                if len(members) > 1:  # Otherwise no process waits for another.
                    for process in members & missing:
                        descriptions[process] = _described(collective)
                    missing -= members
        return descriptions


def _described(collective: Collective) -> str:
    layer = collective.layer
    over = f" over {' and '.join(collective.axes)}" if collective.axes else ""
    is_path = " " not in layer and ".py:" not in layer
    where = f", in {'layer ' * is_path}{layer}" if layer != "unknown" else ""
    return f"{collective.kind} of {format_bytes(collective.bytes)}{over}{where}"
