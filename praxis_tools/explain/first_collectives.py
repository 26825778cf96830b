"""Finds the collective in which other processes wait for a stuck process."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from praxis_lite.core.errors import format_bytes
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.trainer.hooks.hook import Hook
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_tools.explain.hlo import Collective, collectives
from praxis_tools.explain.hlo_text import text_of
from praxis_tools.stuck.progress import progress_recorder

if TYPE_CHECKING:
    import jax

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

            @functools.cache
            def descriptions() -> dict[int, str]:
                # The report must be printed even if the program cannot be parsed.
                with contextlib.suppress(Exception):
                    return first_collectives(step, dict(mesh.shape), owners)
                return {}

            progress_recorder.first_collective = lambda process: descriptions().get(process, "")


def first_collectives(
    compiled: "jax.stages.Compiled", axis_sizes: Mapping[str, int], owners: Sequence[int]
) -> dict[int, str]:
    """Describes the first collective in a program that involves the devices of each process.

    Args:
      compiled: The program.
      axis_sizes: Number of devices along each mesh axis.
      owners: Process index of each device, in the mesh's row-major order.

    Returns:
      A dict from process indices to descriptions, without the processes that wait for no other
      process. It is empty if the program is too large to parse quickly.
    """
    descriptions: dict[int, str] = {}
    text, process_of = text_of(compiled), np.array(owners)
    if len(text) > _MAX_TEXT_BYTES:
        return descriptions
    missing = set(owners)
    for collective in collectives(text, axis_sizes):
        if collective.groups is None or not missing:
            continue
        for group in collective.groups:
            members = set(process_of[group].tolist())
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
