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
from praxis_lite.job.processes.stacks import install_stacks_handler, stacks
from praxis_tools.stuck.progress import own

# The variable that makes a process a worker: "file descriptor of its reports:supervisor's PID".
WORKER = "PRAXIS_LITE_WORKER"
# The status of a worker that ends because another is gone (EX_TEMPFAIL).
LOST_PEER_STATUS = 75
# A worker that was stopped for so long checks whether the others continued without it.
_STOPPED_SECONDS = 5.0
_PROGRESS_SECONDS = 1.0
# A worker that has waited for so long reports its stacks, because it may end before it is asked.
_WAITS_SECONDS = 20.0
# Of these stacks: they fit into the pipe, from which a supervisor that is stopped reads nothing.
_MOST_CHARACTERS = 30_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order(Membership):
    """The part of a worker in a generation of an elastic job, and what it needs for that.

    Attributes:
      stores: "host:port" of each member's peer store, in the order of their processes.
      folder: in which the supervisors meet.
    """

    stores: tuple[str, ...]
    folder: str = ""
    lost_status: int = LOST_PEER_STATUS

    def line(self) -> str:
        """Returns the order as a line of JSON."""
        return json.dumps({**dataclasses.asdict(self), "key": self.key.hex()}) + "\n"

    @classmethod
    def of_line(cls, line: str) -> "Order":
        """Returns the order that `line` returned."""
        fields = json.loads(line)
        return cls(**{
            **fields, "members": tuple(fields["members"]), "stores": tuple(fields["stores"]),
            "key": bytes.fromhex(fields["key"]),
        })


_order: Order | None = None
_pipe = -1
_lock = threading.Lock()


def current() -> Order | None:
    """Returns the order that this process works on; None if its run is not elastic."""
    return _order


def is_worker() -> bool:
    """Returns True if a supervisor started this process."""
    return WORKER in os.environ


def wait_for_order(prepare: Callable[[], None]) -> Order:
    """Returns the supervisor's order; ends this process if the supervisor ends.

    Args:
      prepare: imports what the work needs, before there is an order.
    """
    global _order, _pipe
    pipe, _, supervisor = os.environ.pop(WORKER).partition(":")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG.
    if os.getppid() != int(supervisor):
        os._exit(0)
    signals.listen_to_supervisor_only()
    prepare()
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    _order, _pipe = Order.of_line(line), int(pipe)
    threading.Thread(target=_end_if_stopped_for_long, name="not stopped", daemon=True).start()
    return _order


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
    """Reports what this process does from now on, as one of goodput's kinds."""
    global _phase
    name = "step" if name == "input wait" else name  # They alternate in each step.
    if _pipe >= 0 and name != _phase:
        _phase = name
        report(phase=name, at=time.monotonic(), doing=name)


def report(**fields: Any) -> None:
    """Reports values for JSON by name, which replace earlier ones; from any thread.

    Does nothing in a run that is not elastic. A supervisor that is gone is no error: this process
    ends with it.
    """
    if _pipe < 0:
        return
    data = json.dumps(fields).encode() + b"\n"
    with _lock, contextlib.suppress(OSError):
        while data:
            data = data[os.write(_pipe, data) :]


class ToSupervisor(Listener):
    """Reports the events of this process to the supervisor."""

    def begins(self, phase: Phase, step: int | None) -> None:
        tell_phase(phase.counts_as)

    def resumes(self, phase: Phase) -> None:
        tell_phase(phase.counts_as)

    def report(self, facts: Mapping[str, Any]) -> None:
        report(**facts)


def report_progress() -> None:
    """Begins to report the progress of this worker, once a second, from a thread.

    The supervisor gets `progress`, the fields of `Progress`, and `stacks_file`, the path for
    `stacks.request_stacks`. Once the worker waits it also gets `stacks`, and `first_collectives`:
    for each process, as text, the first collective of a training step that needs its devices.
    """
    report(stacks_file=install_stacks_handler())
    threading.Thread(target=_report_progress, name="progress", daemon=True).start()


def _report_progress() -> None:
    has_reported_wait = False
    while True:
        time.sleep(_PROGRESS_SECONDS)
        progress = own.progress_of(_order.index)
        report(progress=dataclasses.asdict(progress))
        if progress.silent_seconds < _WAITS_SECONDS:
            if has_reported_wait:
                report(stacks="")
            has_reported_wait = False  # The next program may be another one.
        elif not has_reported_wait:
            has_reported_wait = True
            collectives = list(map(own.first_collective, range(len(_order.members))))
            report(first_collectives=collectives, stacks=stacks()[:_MOST_CHARACTERS])
