"""What a peer save costs beside a save to disk: the seconds that training waits, and until it is whole.

`python benchmarks/peer_saves.py` prints both, and the seconds of a restore from each, for weights
of --millions of parameters with Adam's slots. The memory of two hosts is that of two processes on
this machine, so the figures are of its loopback; files lie in a temporary folder (TMPDIR).
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from praxis_lite.core import MeshConfig, StateLayout, TrainState, make_mesh
from praxis_lite.run.checkpoints.checkpoints import Checkpoints
from praxis_lite.run.checkpoints.peers.newest_state import NewestState
from praxis_lite.run.checkpoints.peers.peer_saver import PeerSaver, stores_of
from praxis_lite.run.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.run.job.elastic.order import Order
from praxis_lite.run.job.elastic.peer_store import PeerStore

KEY, LAYERS, DIM = b"of a benchmark", 25, 2000


def host(pipe: multiprocessing.connection.Connection) -> None:
    """Holds a peer store until the pipe is closed."""
    with PeerStore(KEY, "127.0.0.1") as store:
        pipe.send(store.address)
        pipe.poll(None)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=100)
    rows = parser.parse_args().millions * 1_000_000 // (LAYERS * DIM)
    weights = {f"w{k}": jax.ShapeDtypeStruct((rows, DIM), "float32") for k in range(LAYERS)}
    shapes = TrainState(
        jax.ShapeDtypeStruct((), "int32"), {"params": weights, "non_trainable": {}},
        {"slots": {"mu": weights, "nu": weights}},
    )
    layout = StateLayout(shapes, jax.tree.map(lambda x: P(*(None,) * x.ndim), shapes),
                         {"replica": 1, "data": 1, "mdl": 1})  # fmt: skip
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1)))
    state = jax.tree.map(lambda x: jnp.full(x.shape, 2, x.dtype), shapes)
    spawn, hosts = multiprocessing.get_context("spawn"), []
    for _ in range(2):
        pipe, child = spawn.Pipe()
        spawn.Process(target=host, args=(child,), daemon=True).start()
        hosts.append((pipe, pipe.recv()))
    order = Order(
        generation=1, member=0, members=(0, 1), stores=tuple(address for _, address in hosts),
        store_key=KEY, coordinator="",
    )
    stores = stores_of(order)
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            with Checkpoints(folder, saving=SaveSettings()) as disk:
                waits = seconds(lambda: disk.save(step, state, layout))
                whole = seconds(disk.wait)
            print(f"disk: training waits {waits:.3f} s, whole after {waits + whole:.2f} s")
        with PeerSaver(order, stores, layout, mesh, print) as saver:
            for step in (3, 4):
                waits = seconds(lambda: saver.begin(step, state, {}))
                whole = seconds(saver.wait)
                print(f"memory: training waits {waits:.3f} s, whole after {waits + whole:.2f} s")
        disk = Checkpoints(folder)
        for name, of in [("disk", []), ("memory", stores)]:
            began = time.perf_counter()
            newest = NewestState(disk, of, print)
            verified = time.perf_counter() - began
            read = seconds(lambda: newest.restore(layout, mesh).state)
            print(f"restore from {newest.source}: verified in {verified:.2f} s, read in {read:.2f} s")
            assert newest.source == {"memory": "peers"}.get(name, name)


if __name__ == "__main__":
    main()
