"""A process of a two-process job, or an intruder, for `test_strangers`.

Arguments: KIND COORDINATOR INDEX [DIR]. With KIND "plain" or "elastic", the process connects in
the same way as the library and prints "connected". After it reads a line from standard input, it
prints the value of the job's key and exits with status 0. With KIND "stranger", the process does
not know the secret; it connects to the coordinator's port with JAX's client and prints the
operations that succeed.
"""

import os
import sys

from jax._src.lib import _jax

from praxis_lite.job import processes
from praxis_lite.job.processes.start import connect_member, start
from praxis_tools.elastic.worker_assignment import Assignment

NAME = "praxis_lite/newest"


def _stranger(coordinator: str, index: int) -> None:
    client = _jax.get_distributed_runtime_client(
        coordinator, index, init_timeout=5, shutdown_timeout=1
    )
    for what, do in (
        ("connected", client.connect),
        ("read", lambda: client.key_value_dir_get("praxis_lite")),
        ("wrote", lambda: client.key_value_set(NAME, "the stranger's", True)),
    ):
        try:
            do()
            print(what, flush=True)
        except RuntimeError:
            pass


def main() -> None:
    """Runs the process of the given kind."""
    kind, coordinator, index, *folder = sys.argv[1:]
    if kind == "stranger":
        _stranger(coordinator, int(index))
        os._exit(0)
    if kind == "elastic":
        connect_member(
            Assignment(
                generation=1,
                member=int(index),
                members=(0, 1),
                stores=("", ""),
                key=b"the key of the job",
                coordinator=coordinator,
                num_slots=2,
            ),
            30,
        )
    else:
        start(coordinator, 2, int(index), 30, *folder)
    if index == "0":
        processes.client().key_value_set(NAME, "the job's")
    print("connected", file=sys.stderr, flush=True)
    sys.stdin.readline()
    print(processes.client().key_value_try_get(NAME), file=sys.stderr, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
