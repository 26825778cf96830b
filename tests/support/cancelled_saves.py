"""Cancels a save in two processes; `test_cancelled_saves` runs this script in each of them.

Arguments: the coordinator, the index of the process, a folder, and the indices of the processes
that receive SIGINT. Each process writes a JSON file to the folder with its log, its error, the
duration of its save in seconds, and the steps that exist afterwards.
"""

import asyncio
import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from orbax.checkpoint._src.serialization import serialization

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import Learner, Partitioner, simulate_devices
from praxis_lite.job import processes
from praxis_lite.job.processes.start import start
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

WRITE = serialization.async_serialize_from_host


def main(coordinator: str, index: int, folder: Path, interrupted: str) -> None:
    """Saves step 3, cancels the save of step 7, and saves step 9."""
    start(coordinator, 2, index)
    simulate_devices(4, 2)
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    model = FunctionModel(lambda key: {"w": jnp.ones((13, 7))}, {"w": ("data", None)})
    loss = lambda params, inputs, key: inputs["x"] * jnp.sum(params["w"])  # noqa: E731
    partitioner = Partitioner(LossTask(model, loss, Learner(optax.sgd, 0.1)), mesh)
    state, layout = partitioner.init(partitioner.key(0)), partitioner.layout
    seen, began = {"told": [], "error": ""}, threading.Event()
    gets_signal = str(index) in interrupted

    async def slow(*args, **kwargs):
        began.set()
        # A process that is not interrupted writes its part completely.
        await asyncio.sleep(60 if gets_signal else 1)
        await WRITE(*args, **kwargs)

    def checkpoints() -> Checkpoints:
        return Checkpoints(folder / "steps", saving=SaveSettings())

    log = logging.Handler()
    log.emit = lambda record: seen["told"].append(record.getMessage())
    logging.getLogger("praxis_lite").addHandler(log)

    try:
        with checkpoints() as saved:
            saved.save(3, state, layout, {})
            saved.wait()
            serialization.async_serialize_from_host = slow
            saved.save(7, state, layout, {})
            assert began.wait(30)
            processes.exchange("both write", "")
            since = time.monotonic()
            if gets_signal:
                signal.raise_signal(signal.SIGINT)
    except BaseException as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen["seconds"] = time.monotonic() - since
    serialization.async_serialize_from_host = WRITE
    processes.exchange("cancelled", "")
    seen["steps"] = sorted(path.name for path in (folder / "steps").iterdir())
    processes.exchange("seen", "")
    with checkpoints() as saved:
        saved.save(9, state, layout, {})
    (folder / f"{index}.json").write_text(json.dumps(seen))
    processes.exchange("written", "")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
