"""The order of a supervisor to its worker, and the worker's reports to it."""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from praxis_lite.job.events import Listener, Phase
from praxis_lite.job.processes import signals
from praxis_lite.job.processes.membership import Membership

# The variable that makes a process a worker: "file descriptor of its reports:supervisor's PID".
WORKER = "PRAXIS_LITE_WORKER"
# The status of a worker that ends because another is gone (EX_TEMPFAIL).
LOST_PEER_STATUS = 75
# A worker that finds itself stopped for so long asks whether the others went on without it.
_STOPPED_SECONDS = 5.0


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
      num_slots: of processes in the whole job, `--num_processes`.
      reason: why the generation began, in words.
      folder: in which the supervisors meet.
    """

    generation: int
    member: int
    members: tuple[int, ...]
    stores: tuple[str, ...]
    store_key: bytes
    coordinator: str
    num_slots: int = 1
    reason: str = ""
    folder: str = ""

    @property
    def index(self) -> int:
        """The index of this worker's process among those of the generation."""
        return self.members.index(self.member)

    @property
    def membership(self) -> Membership:
        """The worker's part, as the run needs to know it."""
        return Membership(
            generation=self.generation, member=self.member, members=self.members,
            num_slots=self.num_slots, coordinator=self.coordinator, key=self.store_key,
            lost_status=LOST_PEER_STATUS,
        )

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


def is_worker() -> bool:
    """Returns True if a supervisor started this process."""
    return WORKER in os.environ


def wait_for_order(prepare: Callable[[], None]) -> Order:
    """Returns the supervisor's order; ends this process if the supervisor ends.

    Args:
      prepare: imports what the work needs, before there is an order.
    """
    pipe, _, supervisor = os.environ.pop(WORKER).partition(":")
    _ends_with_supervisor(int(supervisor))
    signals.hear_supervisor_alone()
    prepare()
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    take(Order.of_line(line), int(pipe))
    threading.Thread(target=_end_if_stopped_for_long, name="not stopped", daemon=True).start()
    return _order


def _ends_with_supervisor(supervisor: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG.
    if os.getppid() != supervisor:
        os._exit(0)


def _end_if_stopped_for_long() -> None:
    before = time.monotonic()
    while True:
        time.sleep(0.5)
        now = time.monotonic()
        newer = f"{_order.folder}/generations/{_order.generation + 1}.json"
        if now - before > _STOPPED_SECONDS and os.path.exists(newer):
            os._exit(LOST_PEER_STATUS)
        before = now


_phase = ""


def tell_phase(name: str) -> None:
    """Tells the supervisor what this process does from now on, as the goodput's kinds say it."""
    global _phase
    name = "step" if name == "input wait" else name  # They alternate in each step.
    if _pipe >= 0 and name != _phase:
        _phase = name
        report(phase=name, at=time.monotonic(), doing=name)


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


class ToSupervisor(Listener):
    """Tells the supervisor the events of this process."""

    def begins(self, phase: Phase, step: int | None) -> None:
        tell_phase(phase.counts_as)

    def resumes(self, phase: Phase) -> None:
        tell_phase(phase.counts_as)

    def report(self, facts: Mapping[str, Any]) -> None:
        report(**facts)
