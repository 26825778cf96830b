"""Two processes run this script for `test_multiprocess`, with coordinator and index as arguments.

The first process prints its observations as JSON. At the end, the second process kills itself.
"""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from praxis_lite import PeerLost
from praxis_lite.core import Learner, Partitioner, global_batch, simulate_devices
from praxis_lite.core.sharding.batch_sharding import process_rows
from praxis_lite.inputs import InMemory
from praxis_lite.job import processes
from praxis_lite.job.processes import peers
from praxis_lite.job.processes.logs import command_log
from praxis_lite.job.processes.start import start
from praxis_lite.job.processes.stop_consensus import StopConsensus
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask
from praxis_lite.trainer.evaluation import Evaluator


def rows_that_arrived(mesh: Mesh, num_rows: int) -> bool:
    """Returns whether a batch has the same shards on the devices as with a single process.

    The processes pass only their own rows first, and then all rows.
    """
    inputs = {
        "ids": np.arange(1, num_rows * 5 + 1, dtype=np.int32).reshape(num_rows, 5),
        "scale": np.float32(0.3),
    }
    local = process_rows(num_rows, mesh)
    own_rows = global_batch({**inputs, "ids": inputs["ids"][local]}, mesh, num_rows)
    all_rows = global_batch(inputs, mesh)
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    expected = np.zeros((-(-num_rows // mesh.size) * mesh.size, 5), np.int32)
    expected[:num_rows] = inputs["ids"]
    return all(
        np.array_equal(gathered["ids"], expected) and gathered["scale"] == inputs["scale"]
        for gathered in (gather(own_rows.inputs), gather(all_rows.inputs))
    )


def examples_are_those_of_one_process(mesh: Mesh) -> bool:
    """Returns whether an evaluation of 13 examples in batches of 5 yields all examples in order."""
    x = np.arange(13.0, dtype=np.float32)

    def loss(params, inputs, key):
        return jnp.square(inputs["x"] * params["w"])

    model = FunctionModel(lambda key: {"w": jnp.full((4,), 3.0)[0]})
    partitioner = Partitioner(LossTask(model, loss, Learner(optax.sgd, 0.1)), mesh)
    data = InMemory({"x": x}, batch_size=5, shuffle=False)
    mdl_vars = partitioner.init(partitioner.key(0)).mdl_vars
    examples = {}
    means = Evaluator(partitioner, {"all": data}, None).run(1, mdl_vars, examples=examples)
    wanted = np.square(3 * x)
    actual = np.array([example["loss"] for example in examples["all"]])
    return bool(np.array_equal(actual, wanted) and np.isclose(means["all"]["loss"], wanted.mean()))


def mesh_of(order: list[int]) -> Mesh:
    """Returns a mesh of all devices in the given order."""
    devices = np.array(jax.devices())[order].reshape(2, -1)
    return Mesh(devices, ("data", "mdl"), axis_types=(AxisType.Auto,) * 2)


def main() -> None:
    """Runs all parts of the script."""
    start(sys.argv[1], 2, int(sys.argv[2]))
    simulate_devices(6, 2)
    seen = {}
    orders = {"in turn": range(6), "interleaved": (0, 3, 1, 4, 2, 5), "nested": (0, 3, 4, 5, 1, 2)}
    for name, order in orders.items():
        mesh = mesh_of(list(order))
        seen[name] = [rows_that_arrived(mesh, num_rows) for num_rows in (5, 13)]
    seen["examples"] = examples_are_those_of_one_process(mesh)
    consensus, me = StopConsensus(mesh), processes.index()
    # The second process requests a stop in its third call; both see it in their fourth call.
    seen["agreed"] = [consensus.should_stop(me == 1 and call == 2) for call in range(6)]
    seen["asked by"] = consensus.stop_reason
    # The first process requests a profile; the second learns its number of steps one call later.
    consensus.should_stop(False, profile_steps=0 if me else 5)
    consensus.should_stop(False)
    seen["profiled steps"] = processes.exchange("steps", str(consensus.profile_steps))
    for _ in range(8):
        consensus.add_host_seconds(0.5 * me)
        consensus.should_stop(False)
    seen["exchanged"] = [processes.exchange("word", f"{me}.{k}") for k in range(3)]
    if me == 0:
        try:
            processes.exchange("never", "", 0.5)
        except PeerLost as error:
            seen["missing"] = str(error)
        print(json.dumps(seen), flush=True)
    processes.exchange("after it", "")
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    peers.SILENT_SECONDS = 4.0  # Shorten the timeout of 20 s.
    while True:
        consensus.should_stop(False)


if __name__ == "__main__":
    with peers.ending_together(), command_log():
        main()
