"""The order of a supervisor to its worker, and the worker's reports to it."""

import contextlib
import dataclasses
import json
import os
import threading
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The part that a worker has in a generation of an elastic job.

    Attributes:
      generation: its number; each change of hands begins the next.
      member: the number of this worker's host, `--process_id`, which stays the same.
      members: of the generation, in the order of their processes.
      stores: "host:port" of each member's peer store, in that order.
      store_key: the secret by which the stores know the job's processes.
      coordinator: "host:port" of JAX's coordination service in this generation.
      num_local_devices: simulated devices of each process; None: accelerators.
      reason: why the generation began, in words.
    """

    generation: int
    member: int
    members: tuple[int, ...]
    stores: tuple[str, ...]
    store_key: bytes
    coordinator: str
    num_local_devices: int | None
    reason: str

    @property
    def index(self) -> int:
        """The index of this worker's process among those of the generation."""
        return self.members.index(self.member)

    def line(self) -> str:
        """Returns the order as a line of JSON."""
        return json.dumps({**dataclasses.asdict(self), "store_key": self.store_key.hex()}) + "\n"

    @classmethod
    def of_line(cls, line: str) -> "Order":
        """Returns the order that `line` gave."""
        fields = json.loads(line)
        return cls(**{
            **fields, "members": tuple(fields["members"]), "stores": tuple(fields["stores"]),
            "store_key": bytes.fromhex(fields["store_key"]),
        })


_order: Order | None = None
_pipe = -1
_lock = threading.Lock()


def current() -> Order | None:
    """Returns the order that this process works on; None if its run is not elastic."""
    return _order


def take(order: Order | None, pipe: int) -> None:
    """Makes an order that of this process, whose reports go to a file descriptor."""
    global _order, _pipe
    _order, _pipe = order, pipe


def report(**fields: Any) -> None:
    """Tells the supervisor values for JSON by name, which replace those it knew; any thread.

    Nothing happens in a run that is not elastic. A supervisor that is gone is no error: this
    process ends with it.
    """
    if _pipe < 0:
        return
    data = json.dumps(fields).encode() + b"\n"
    with _lock, contextlib.suppress(OSError):
        while data:
            data = data[os.write(_pipe, data) :]
