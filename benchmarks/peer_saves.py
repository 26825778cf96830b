"""Compares peer saves with saves to disk: time that training waits, and total time.

`python benchmarks/peer_saves.py` also prints the time to restore from peers and from disk, for a
model with --millions of parameters and Adam's slots. Two processes on this machine simulate two
hosts, which communicate over the loopback interface. Checkpoints are written to a temporary
directory (TMPDIR).
"""

import argparse
import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import MeshConfig, StateLayout, TrainState, make_mesh
from praxis_tools.elastic.peer_saves.newest_state import NewestState
from praxis_tools.elastic.peer_saves.peer_saver import PeerSaver, stores_of
from praxis_tools.elastic.peer_store import PeerStore
from praxis_tools.elastic.worker_assignment import Assignment

KEY, LAYERS, DIM = b"of a benchmark", 25, 2000


def host(pipe: Connection) -> None:
    """Runs a peer store until the pipe is closed."""
    with PeerStore(KEY, "127.0.0.1") as store:
        pipe.send(store.address)
        pipe.poll(None)


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


def main() -> None:
    """Prints the times of saves and restores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=100)
    rows = parser.parse_args().millions * 1_000_000 // (LAYERS * DIM)
    weights = {f"w{k}": jax.ShapeDtypeStruct((rows, DIM), "float32") for k in range(LAYERS)}
    shapes = TrainState(
        jax.ShapeDtypeStruct((), "int32"),
        {"params": weights, "non_trainable": {}},
        {"slots": {"mu": weights, "nu": weights}},
    )
    layout = StateLayout(shapes, jax.tree.map(lambda x: P(*(None,) * x.ndim), shapes),
                         {"replica": 1, "data": 1, "mdl": 1})  # fmt: skip
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1)))
    # Random numbers, which cannot be compressed.
    numbers = jax.random.normal(jax.random.key(0), (rows, DIM))
    state = jax.tree.map(lambda x: jnp.copy(numbers) if x.shape else jnp.int32(0), shapes)
    spawn, hosts = multiprocessing.get_context("spawn"), []
    for _ in range(2):
        pipe, child = spawn.Pipe()
        spawn.Process(target=host, args=(child,), daemon=True).start()
        hosts.append((pipe, pipe.recv()))
    order = Assignment(
        generation=1,
        member=0,
        members=(0, 1),
        stores=tuple(address for _, address in hosts),
        key=KEY,
        coordinator="",
        num_slots=2,
    )
    stores = stores_of(order)
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            with Checkpoints(folder, saving=SaveSettings()) as disk:
                save = functools.partial(disk.save, step, state, layout)
                show("disk", save, disk.wait)
        with PeerSaver(order, stores, layout, mesh, print) as saver:
            for step in (3, 4):
                show("memory", functools.partial(saver.begin, step, state, {}), saver.wait)
        for of in ([], stores):
            began = time.perf_counter()
            newest = NewestState(Checkpoints(folder), of, print)
            verified = time.perf_counter() - began
            read = seconds(lambda newest=newest: newest.restore(layout, mesh).state)
            print(f"from {newest.source}: verified in {verified:.2f} s, read in {read:.2f} s")


def show(name: str, begin: Callable[[], object], wait: Callable[[], object]) -> None:
    """Prints the time of a save."""
    waits = seconds(begin)
    print(f"{name}: training waits {waits:.3f} s, complete after {waits + seconds(wait):.2f} s")


if __name__ == "__main__":
    main()
