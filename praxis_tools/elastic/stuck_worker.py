"""The progress of an elastic job's worker, told to its supervisor."""

import dataclasses
import threading

from praxis_lite.job.processes.stacks import give_when_asked, stacks
from praxis_tools.elastic import order
from praxis_tools.stuck.progress import own

_EVERY_SECONDS = 1.0
# A worker that has waited for so long says what for, should somebody ask.
_WAITS_SECONDS = 20.0
# Of its stacks: they fit into the pipe, where a supervisor that is stopped reads nothing.
_MOST_CHARACTERS = 30_000


def tell_supervisor(process: int, num_processes: int) -> None:
    """Begins to report the progress of this worker, once a second, from a thread.

    The supervisor gets `progress`, the fields of `Progress`, and `stacks_file`, the path for
    `stacks.asked_for`. Once the worker waits it also gets `stacks`, for a worker may end before it
    is asked, with whom it waits for; and `first_collectives`: for each process, in words, the first
    collective of a training step that needs its devices.
    """
    order.report(stacks_file=give_when_asked())
    threading.Thread(
        target=_tell, args=(process, num_processes), name="progress", daemon=True
    ).start()


def _tell(process: int, num_processes: int) -> None:
    has_told_wait, over = False, threading.Event()
    while not over.wait(_EVERY_SECONDS):
        progress = own.progress_of(process)
        order.report(progress=dataclasses.asdict(progress))
        if progress.silent_seconds < _WAITS_SECONDS:
            if has_told_wait:
                order.report(stacks="")
            has_told_wait = False  # The next program may be another.
        elif not has_told_wait:
            has_told_wait = True
            collectives = list(map(own.first_collective, range(num_processes)))
            order.report(first_collectives=collectives, stacks=stacks()[:_MOST_CHARACTERS])
