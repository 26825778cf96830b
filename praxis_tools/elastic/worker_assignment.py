"""The protocol between a supervisor and its worker: assignments and reports."""

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

from praxis_lite.host.object_stores import is_store_url
from praxis_lite.job.events import Listener, Phase
from praxis_lite.job.processes import signals
from praxis_lite.job.processes.membership import Membership
from praxis_lite.job.processes.stacks import install_stacks_handler, stacks
from praxis_tools.stuck.progress import progress_recorder

# Environment variable of worker processes, "FD:PID": the file descriptor for reports and the
# supervisor's process id.
WORKER = "PRAXIS_LITE_WORKER"
# Exit status of a worker that exits because another process died (EX_TEMPFAIL).
LOST_PEER_STATUS = 75
# After being suspended for this long, a worker checks whether other workers have continued without
# it.
_SUSPENDED_SECONDS = 5.0
_PROGRESS_SECONDS = 1.0
# After waiting for this long, a worker reports its stacks without a request, because it may be
# killed before it receives one.
_WAITING_SECONDS = 20.0
# Maximum size of these stacks. They must fit in the pipe even while the supervisor is not reading.
_MAX_STACK_CHARACTERS = 30_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment(Membership):
    """A worker's membership in a generation, with the addresses that the worker needs.

    Attributes:
      stores: "host:port" of each member's peer store, in the order of their processes.
      folder: Folder or URL through which the supervisors coordinate.
    """

    stores: tuple[str, ...]
    folder: str = ""
    lost_status: int = LOST_PEER_STATUS

    def line(self) -> str:
        """Formats the assignment as a line of JSON."""
        return json.dumps({**dataclasses.asdict(self), "key": self.key.hex()}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Assignment":
        """Parses the result of `line`."""
        fields = json.loads(line)
        return cls(
            **{
                **fields,
                "members": tuple(fields["members"]),
                "stores": tuple(fields["stores"]),
                "key": bytes.fromhex(fields["key"]),
            }
        )


_assignment: Assignment | None = None
_pipe = -1
_lock = threading.Lock()


def current() -> Assignment | None:
    """Returns the assignment of this process, or None if the job is not elastic."""
    return _assignment


def is_worker() -> bool:
    """Returns whether a supervisor started this process."""
    return WORKER in os.environ


def wait_for_assignment(prepare: Callable[[], None]) -> Assignment:
    """Waits for the assignment from the supervisor; exits if the supervisor exits.

    Args:
      prepare: Function that imports the modules for training; called before waiting.
    """
    global _assignment, _pipe
    pipe, _, supervisor = os.environ.pop(WORKER).partition(":")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG.
    if os.getppid() != int(supervisor):
        os._exit(0)
    signals.listen_to_supervisor_only()
    prepare()
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    _assignment = assignment = Assignment.from_line(line)
    _pipe = int(pipe)
    if not is_store_url(assignment.folder):  # There, the job's lease does this.
        threading.Thread(
            target=_exit_after_suspension, args=(assignment,), name="not stopped", daemon=True
        ).start()
    return assignment


def _exit_after_suspension(assignment: Assignment) -> None:
    """Exits if a new generation began while this process was suspended (SIGSTOP)."""
    before = time.monotonic()
    next_generation = f"{assignment.folder}/generations/{assignment.generation + 1}.json"
    while True:
        time.sleep(0.5)
        now = time.monotonic()
        if now - before > _SUSPENDED_SECONDS and os.path.exists(next_generation):
            os._exit(LOST_PEER_STATUS)
        before = now


_phase = ""


def report_phase(name: str) -> None:
    """Reports that this process begins a phase; `name` is a goodput time category."""
    global _phase
    name = "step" if name == "input wait" else name  # Both occur in every step; report only one.
    if _pipe >= 0 and name != _phase:
        _phase = name
        report(phase=name, at=time.monotonic(), doing=name)


def report(**fields: Any) -> None:
    """Sends named JSON values to the supervisor, replacing earlier values.

    This function may be called from any thread. It does nothing if the job is not elastic, or if
    the supervisor has exited, because this process then exits as well.
    """
    if _pipe < 0:
        return
    data = json.dumps(fields).encode() + b"\n"
    with _lock, contextlib.suppress(OSError):
        while data:
            data = data[os.write(_pipe, data) :]


class SupervisorListener(Listener):
    """Forwards the events of this process to the supervisor."""

    def begins(self, phase: Phase, step: int | None) -> None:
        report_phase(phase.counts_as)

    def resumes(self, phase: Phase) -> None:
        report_phase(phase.counts_as)

    def report(self, facts: Mapping[str, Any]) -> None:
        report(**facts)


def report_progress() -> None:
    """Starts a thread that reports the progress of this worker once a second.

    The reported values are `progress` (the fields of `Progress`) and `stacks_file` (the path for
    `stacks.request_stacks`). A worker that has been waiting for a long time also reports `stacks`
    and `first_collectives`. The latter describes, for each process, the first collective of a
    training step that involves the devices of that process.
    """
    assert _assignment is not None, "called before wait_for_assignment"
    report(stacks_file=install_stacks_handler())
    threading.Thread(
        target=_report_progress, args=(_assignment,), name="progress", daemon=True
    ).start()


def _report_progress(assignment: Assignment) -> None:
    has_reported_wait = False
    while True:
        time.sleep(_PROGRESS_SECONDS)
        progress = progress_recorder.progress_of(assignment.index)
        report(progress=dataclasses.asdict(progress))
        if progress.silent_seconds < _WAITING_SECONDS:
            if has_reported_wait:
                report(stacks="")
            has_reported_wait = False  # The next wait may be in a different compiled step.
        elif not has_reported_wait:
            has_reported_wait = True
            first_collective = progress_recorder.first_collective
            collectives = list(map(first_collective, range(len(assignment.members))))
            report(first_collectives=collectives, stacks=stacks()[:_MAX_STACK_CHARACTERS])
