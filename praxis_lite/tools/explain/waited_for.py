"""The collectives in which processes wait for a stuck process, read from the compiled step."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from praxis_lite.core.errors import format_bytes
from praxis_lite.inputs.base import TRAIN
from praxis_lite.run.job import processes
from praxis_lite.run.job.processes.stuck.progress import own
from praxis_lite.run.trainer.hooks.hook import Hook
from praxis_lite.run.trainer.job_on_mesh import JobOnMesh
from praxis_lite.tools.explain.hlo import Collective, collectives

# Of the text of a program: it is read in seconds, in which the thread that asks does not beat.
_MOST_BYTES = 2**24


class WaitedFor(Hook):
    """Tells the messages of stuck processes where the others wait; costs nothing before."""

    every, waits = None, False

    def __init__(self, job: JobOnMesh):
        self._job = job

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        if processes.count() > 1:
            partitioner = self._job.partitioner
            # In this thread, in which the first call will find it compiled.
            step = partitioner.train_step.lower(self._job.datasets[TRAIN].element_spec()).compile()
            mesh = partitioner.mesh
            owners = [device.process_index for device in mesh.devices.flat]
            own.first_collective = FirstCollectives(step, dict(mesh.shape), owners)


class FirstCollectives:
    """The first collective of a program that needs the devices of a process, by its index.

    The program is read when it is first asked for, from any thread.

    Args:
      compiled: the program, or its text.
      axis_sizes: of the mesh.
      owners: the process of each device, as the devices lie in the mesh, row by row.
    """

    def __init__(
        self, compiled: "jax.stages.Compiled | str", axis_sizes: Mapping[str, int],
        owners: Sequence[int],
    ):
        self._compiled, self._axis_sizes, self._owners = compiled, axis_sizes, np.array(owners)
        self._words: dict[int, str] | None = None
        self._lock = threading.Lock()

    def __call__(self, process: int) -> str:
        """Returns the collective in words, "" if there is none or the program cannot be read."""
        with self._lock:
            if self._words is None:
                # Whatever is wrong with the text, the message comes without it.
                self._words = {}
                with contextlib.suppress(Exception):
                    self._words = self._read()
        return self._words.get(process, "")

    def _read(self) -> dict[int, str]:
        text = self._compiled if isinstance(self._compiled, str) else self._compiled.as_text()
        words: dict[int, str] = {}
        if len(text) > _MOST_BYTES:
            return words
        missing = set(self._owners.tolist())
        for item in collectives(text, self._axis_sizes):
            if item.groups is None or not missing:
                continue
            for group in item.groups:
                among = set(self._owners[group].tolist())
                if len(among) > 1:  # Else no process waits for another.
                    for process in among & missing:
                        words[process] = _in_words(item)
                    missing -= among
        return words


def _in_words(item: Collective) -> str:
    over = f" over {' and '.join(item.axes)}" if item.axes else ""
    is_path = " " not in item.layer and ".py:" not in item.layer
    where = f", in {'layer ' * is_path}{item.layer}" if item.layer != "unknown" else ""
    return f"{item.kind} of {format_bytes(item.bytes)}{over}{where}"
