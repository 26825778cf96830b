"""Jobs of two real processes that get signals at places where they wait: `jobzoo.gated.Gated`.

A process that comes to a place says so in a folder, and waits there until the test opens it, or
for ever. So no clock decides when a signal comes.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from praxis_lite.run.job.job_dir import JobDir
from tests.support import line_jobs  # noqa: F401 (writes jobzoo.lines)
from tests.support import process_pairs as pairs
from tests.support.job_runs import home, lines_of

EXPERIMENT = '''
import asyncio
import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

import fiddle as fdl
import jax
from orbax.checkpoint._src.serialization import serialization

from jobzoo.lines import Line, Lines
from praxis_lite import EvaluationSettings, Hook, MeshConfig, RunConfig, SaveSettings, register
from praxis_lite.run.checkpoints import checkpoints
from praxis_lite.run.checkpoints.orbax_write import OrbaxWrite
from praxis_lite.run.checkpoints.steps import step_files

LIBC = ctypes.CDLL(None)


def is_gate(place):
    """Tells that this process has come to a place; returns True if it is to wait there."""
    folder = os.environ.get("GATES")
    if not folder or place not in os.environ["GATED"].split(","):
        return False
    Path(folder, f"{place}.{jax.process_index()}").touch()
    return not Path(folder, f"{place}.open").exists()


def gate(place):
    while is_gate(place):
        time.sleep(0.02)


def gate_of_c(place):
    """Waits in C code that no signal interrupts, as a compiler does not."""
    if is_gate(place):
        mutex = ctypes.create_string_buffer(64)
        LIBC.pthread_mutex_lock(mutex)

        def open_it():
            gate(place)
            LIBC.pthread_mutex_unlock(mutex)

        threading.Thread(target=open_it, daemon=True).start()
        LIBC.pthread_mutex_lock(mutex)


BEGIN, WRITE, DIGESTS, READ = (
    OrbaxWrite.begin, serialization.async_serialize_from_host, step_files.synced_digests,
    checkpoints.read_state,
)
step = ""  # Of the save in flight, of which there is only one at a time.


def noted_begin(self, folder, state):
    global step
    step = folder.name.removesuffix(".saving")
    BEGIN(self, folder, state)


async def gated_write(*args, **kwargs):
    while is_gate(f"write of {step}"):
        await asyncio.sleep(0.02)
    await WRITE(*args, **kwargs)


def gated_digests(folder):
    gate(f"digests of {step}")
    return DIGESTS(folder)


def gated_read(*args, **kwargs):
    gate("restore")
    return READ(*args, **kwargs)


OrbaxWrite.begin, serialization.async_serialize_from_host = noted_begin, gated_write
step_files.synced_digests, checkpoints.read_state = gated_digests, gated_read


class Gates(Hook):
    """Waits where the first step compiles."""

    every = None

    @contextlib.contextmanager
    def compiling(self):
        gate_of_c("compile")
        yield


class GatedLines(Lines):
    """Waits at the second batch."""

    def rows(self, index, rows):
        if index == 1:
            gate("evaluation")
        return super().rows(index, rows)


@register
class Gated(Line):
    """A line through noisy points, over eight devices."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 8, 1))

    def datasets(self):
        return {
            "train": fdl.Config(Lines, batch_size=13),
            "heldout": fdl.Config(GatedLines, batch_size=13),
        }

    def hooks(self):
        return [fdl.Config(Gates)]

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=29, checkpoints=fdl.Config(SaveSettings, every_steps=7),
            evaluation=fdl.Config(EvaluationSettings, every_steps=10, max_batches=3),
        )
'''
GATED = "--exp=jobzoo.gated.Gated"
(home() / "jobzoo/gated.py").write_text(EXPERIMENT)
