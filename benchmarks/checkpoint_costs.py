"""Measures the cost of checkpoints: slower steps during a save, verification and memory.

`python benchmarks/checkpoint_costs.py` prints measured ratios and their goals. The state is an MLP
with Adam's slots, 384 MiB by default (--mib). Checkpoints are written to a temporary directory
(TMPDIR).

`python -m benchmarks.checkpoint_costs --store --mib=32` instead restores a state from a local S3
server, in a process per host, and prints how many bytes one of the hosts reads.
"""

import argparse
import json
import logging
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.checkpoints.steps.step_store import DiskSteps, steps_in
from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    StateLayout,
    TrainState,
    make_mesh,
)
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

DIMS, BATCH = 1024, 64
GIB, MIB = 1 << 30, 1 << 20
# Seconds per step that the host waits for devices before it runs Python code.
WAIT_SECONDS = 0.1
TINY_MIB = 12
DATA = {"next_batch": 0, "skipped": []}
# Meshes (data, mdl) on which a state from a store is restored. It is saved on the first.
STORE_MESHES, NUM_HOSTS = ((8, 1), (4, 2), (2, 4), (1, 8)), 4


def init(key, num_layers):
    """Returns the params of an MLP: a list of matrices [D, D]."""
    keys = jax.random.split(key, num_layers)
    return [jax.random.normal(item, (DIMS, DIMS)) * DIMS**-0.5 for item in keys]


def loss(params, inputs, key):
    """Returns the mean squared output of each row."""
    x = inputs["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x), axis=-1)


def partitioner_of(mib: int) -> Partitioner:
    """Returns a Partitioner for a model with a state of `mib` MiB, a third of which is weights."""
    num_layers = max(1, mib * MIB // (3 * 4 * DIMS * DIMS))
    task = fdl.Config(
        LossTask,
        fdl.Config(FunctionModel, fdl.Partial(init, num_layers=num_layers)),
        loss,
        fdl.Config(Learner, fdl.Partial(optax.adam), learning_rate=1e-3),
    )
    return Partitioner(fdl.build(task), make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1))))


def step_times(partitioner: Partitioner, directory: Path, num_rounds: int) -> None:
    """Prints by how much a background save slows down the steps."""
    key = partitioner.key(0)
    x = np.random.default_rng(0).normal(size=(BATCH, DIMS)).astype(np.float32)
    batch = partitioner.global_batch({"x": x, "weights": np.ones(BATCH, np.float32)}, BATCH)
    box = [partitioner.init(key)]

    def trained() -> None:
        box[0], outputs = partitioner.train_step(box[0], batch, key)
        jax.block_until_ready((box[0], outputs))

    def waited() -> None:
        time.sleep(WAIT_SECONDS)
        sum(range(20_000))

    trained()
    with Checkpoints(directory, saving=SaveSettings(max_to_keep=2)) as checkpoints:
        number = iter(range(1, 1_000_000))

        for name, step in (
            ("the devices are the CPU itself", trained),
            ("the devices compute elsewhere", waited),
        ):
            with_save, without, blocking, flights = [], [], [], []
            for _ in range(num_rounds):
                checkpoints.wait()
                without += [_seconds(step) for _ in range(8)]
                start = time.perf_counter()
                checkpoints.save(next(number), box[0], partitioner.layout, DATA)
                blocking.append(time.perf_counter() - start)
                while is_in_flight():
                    with_save.append(_seconds(step))
                flights.append(time.perf_counter() - start)
            item, other = statistics.median(with_save), statistics.median(without)
            row(f"step with a save in flight / without, {name}", item, other, 1.05)
            print(
                f"    {len(with_save)} steps in {num_rounds} saves of "
                f"{statistics.median(flights):.2f} s; save() itself returned after "
                f"{statistics.median(blocking):.3f} s"
            )


def is_in_flight() -> bool:
    """Returns whether a save is running, including the deletion of old checkpoints."""
    return any(thread.name.startswith("save of") for thread in threading.enumerate())


def verification(partitioner: Partitioner, directory: Path, num_rounds: int) -> None:
    """Prints the time that verification adds to a restore, with and without the page cache."""
    step_dir = newest(directory)
    size = size_of(step_dir)

    def restore() -> None:
        restored(partitioner, directory)

    def unverified() -> None:
        with mock.patch.object(DiskSteps, "verify", lambda *_: []):
            restore()

    for name, before in (("files cached", lambda: None), ("files on disk", lambda: drop(step_dir))):
        verified, plain = [], []
        for _ in range(num_rounds):
            for seconds, act in ((verified, restore), (plain, unverified)):
                before()
                seconds.append(_seconds(act))
        item, other = statistics.median(verified), statistics.median(plain)
        row(f"restore, verified / not, {name}", item, other, None)
        print(f"    verification adds {(item - other) / (size / GIB):.2f} s per GiB; goal: under 1")


def memory(mib: int, directory: Path) -> None:
    """Prints the peak memory of a restore relative to the size of the state."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as small:
        partitioner = partitioner_of(TINY_MIB)
        with Checkpoints(Path(small), saving=SaveSettings()) as saved:
            state = partitioner.init(partitioner.key(0))
            saved.save(1, state, partitioner.layout, DATA, is_last=True)
        command = [sys.executable, __file__, "--mib", str(mib), "--restore", small, directory]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    before, peak, state = map(int, lines[-3:])
    row("most memory of a restore / state", (peak - before) / MIB, state / MIB, 2.0)


def restore_alone(mib: int, small: Path, directory: Path) -> None:
    """Prints the memory before a restore, its peak, and the size of the state, in bytes."""
    # Exclude the memory that libraries allocate on first use.
    restored(partitioner_of(TINY_MIB), small)
    partitioner = partitioner_of(mib)
    before = _resident()
    state = restored(partitioner, directory)
    print(before, _resident("VmHWM"), sum(x.nbytes for x in jax.tree.leaves(state)))


def restored(partitioner: Partitioner, directory: Path) -> Any:
    """Restores the state of the latest checkpoint."""
    with Checkpoints(directory) as saved:
        return jax.block_until_ready(saved.restore(partitioner.layout, partitioner.mesh).state)


def store_reads(mib: int) -> None:
    """Prints how many bytes the last host reads to restore a state from a store on each mesh."""
    from tests.support.fake_s3 import s3_bucket
    from tests.support.store_proxy import Answer, Request, StoreProxy

    class CountingProxy(StoreProxy):
        def __init__(self, target: str):
            self.sizes: list[int] = []  # The number of bytes in each answer.
            super().__init__(target)

        def forward(self, request: Request) -> Answer:
            answer = super().forward(request)
            self.sizes.append(len(answer.body))
            return answer

    logging.getLogger("werkzeug").disabled = True  # It prints each request.
    with s3_bucket() as url:
        server = os.environ["AWS_ENDPOINT_URL"]
        first = _start_host(server, mib=mib, url=url, mesh=STORE_MESHES[0], num_hosts=1, saves=True)
        assert first.wait() == 0
        for mesh in STORE_MESHES:
            proxy = CountingProxy(server)
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            hosts = [
                _start_host(
                    proxy.url if host == NUM_HOSTS - 1 else server,
                    mib=mib,
                    url=url,
                    mesh=mesh,
                    num_hosts=NUM_HOSTS,
                    host=host,
                    port=port,
                )
                for host in range(NUM_HOSTS)
            ]
            assert all(host.wait() == 0 for host in hosts)
            proxy.close()
            name = f"saved on {STORE_MESHES[0]}, restored on {mesh}: MiB of a host / its shards"
            row(name, sum(proxy.sizes) / MIB, mib / NUM_HOSTS, None)
            print(f"    {len(proxy.sizes)} requests")


def _start_host(endpoint: str, **settings: Any) -> subprocess.Popen[bytes]:
    flags = f"--xla_force_host_platform_device_count={8 // settings['num_hosts']}"
    command = [sys.executable, "-m", "benchmarks.checkpoint_costs", "--host", json.dumps(settings)]
    return subprocess.Popen(
        command, env={**os.environ, "AWS_ENDPOINT_URL": endpoint, "XLA_FLAGS": flags}
    )


def store_host(
    mib: int,
    url: str,
    mesh: tuple[int, int],
    num_hosts: int,
    host: int = 0,
    port: int = 0,
    saves: bool = False,
) -> None:
    """Saves a state to a store, or restores it, as one of the hosts of a job."""
    if num_hosts > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_hosts, host)
    names = [f"w{number}" for number in range(mib * MIB // (4 * DIMS * DIMS))]
    shapes = {name: jax.ShapeDtypeStruct((DIMS, DIMS), np.float32) for name in names}
    specs = dict.fromkeys(names, PartitionSpec("data", "mdl"))
    layout = StateLayout(
        TrainState(jax.ShapeDtypeStruct((), np.int32), {"params": shapes}, {}),
        TrainState(PartitionSpec(), {"params": specs}, {}),
        {"replica": 1, "data": mesh[0], "mdl": mesh[1]},
    )
    devices = make_mesh(MeshConfig(ici_mesh_shape=(1, *mesh)))
    if not saves:
        with Checkpoints(url) as saved:
            jax.block_until_ready(saved.restore(layout, devices).state)
        return
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((DIMS, DIMS), np.float32) for name in names}
    state = TrainState(np.int32(1), {"params": arrays}, {})
    with Checkpoints(url, saving=SaveSettings()) as saved:
        saved.save(1, jax.device_put(state, layout.shardings(devices)), layout, DATA, is_last=True)


def row(name: str, one: float, other: float, goal: float | None) -> None:
    """Prints a line of the table."""
    print(
        f"{name:<70}{one:>10.3f}{other:>10.3f}{one / other:>8.3f}"
        + (f"{goal:>8.2f}" if goal else ""),
        flush=True,
    )


def newest(directory: Path) -> Path:
    """Returns the directory of the latest checkpoint."""
    return directory / str(steps_in(directory).committed()[-1])


def files_of(step_dir: Path) -> Iterator[Path]:
    """Yields the files of a checkpoint."""
    return (path for path in step_dir.rglob("*") if path.is_file())


def size_of(step_dir: Path) -> int:
    """Returns the size of a checkpoint in bytes."""
    return sum(path.stat().st_size for path in files_of(step_dir))


def drop(step_dir: Path) -> None:
    """Drops a checkpoint from the page cache, so that it must be read from disk."""
    os.sync()
    for path in files_of(step_dir):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _resident(which: str = "VmRSS") -> int:
    # Do not use getrusage: its maximum includes the parent's memory from before the exec.
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s*(\d+) kB", status)[1]) * 1024


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=384, help="size of the state")
    parser.add_argument("--num_rounds", type=int, default=5)
    parser.add_argument("--store", action="store_true", help="measure reads from a store instead")
    parser.add_argument("--restore", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--host", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host:
        store_host(**args.host)
        return
    if args.store:
        print(f"{'':<70}{'one':>10}{'other':>10}{'ratio':>8}{'goal':>8}")
        store_reads(args.mib)
        return
    if args.restore:
        restore_alone(args.mib, *args.restore)
        return
    partitioner = partitioner_of(args.mib)
    with tempfile.TemporaryDirectory(prefix="checkpoint_costs_") as folder:
        directory = Path(folder) / "checkpoints"
        print(f"{'':<70}{'one':>10}{'other':>10}{'ratio':>8}{'goal':>8}")
        step_times(partitioner, directory, args.num_rounds)
        verification(partitioner, directory, args.num_rounds)
        step_dir = newest(directory)
        manifest = (step_dir / "manifest.json").stat().st_size
        row("manifest / checkpoint, MiB", manifest / MIB, size_of(step_dir) / MIB, 0.01)
        memory(args.mib, directory)


if __name__ == "__main__":
    main()
