"""Reads the state of a process and its CPU, I/O and scheduling counters from /proc."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_tools.stuck.progress import Progress, progress_recorder

_TICKS = os.sysconf("SC_CLK_TCK")
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or a network file system",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
}


def own_progress(process: int) -> Progress:
    """Returns the progress of this process, given its index; may be called from any thread."""
    return _with_counters(progress_recorder.progress_of(process), os.getpid())


def progress_of_pid(
    pid: int, report: Mapping[str, Any], process: int, unheard_seconds: float
) -> Progress:
    """Returns the progress of another process on this host, such as a supervisor's worker.

    Args:
      pid: Process ID.
      report: Fields of `Progress` in the last report; empty before the first report.
      process: Index of the process in the generation.
      unheard_seconds: Time since the last report, or since the process was started.
    """
    progress = Progress(**{"doing": "import", **report, "process": process})
    return _with_counters(
        dataclasses.replace(
            progress,
            unheard_seconds=unheard_seconds,
            silent_seconds=progress.silent_seconds + unheard_seconds,
        ),
        pid,
    )


def describe_state(pid: int) -> str:
    """Describes the state of a running process on this host; returns "" if it is unknown."""
    parts = []
    if (state := _stat(pid)[0]) not in ("", "Z"):
        parts.append(f"it {_STATES.get(state, 'is alive')} (state {state})")
    with contextlib.suppress(OSError):
        if parts and (function := Path(f"/proc/{pid}/wchan").read_text()) not in ("", "0"):
            parts.append(f"in the kernel function {function}")
    return ", ".join(parts)


def _with_counters(progress: Progress, pid: int) -> Progress:
    """Adds a process's state, and the counters of the process and its running descendants."""
    state, cpu_seconds = _stat(pid)
    children, ready_seconds = _threads(pid)
    while children:
        child = children.pop()
        grandchildren, child_ready_seconds = _threads(child)
        children += grandchildren
        cpu_seconds += _stat(child)[1]
        ready_seconds += child_ready_seconds
    return dataclasses.replace(
        progress,
        state=state,
        cpu_seconds=round(cpu_seconds, 2),
        ready_seconds=round(ready_seconds, 2),
        io_bytes=_io_bytes(pid),
    )


def _stat(pid: int) -> tuple[str, float]:
    """Returns the state of a process and the CPU seconds of the process and exited children."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The program name, in parentheses, may contain spaces and parentheses.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[0], sum(map(int, fields[11:15])) / _TICKS
    return "", 0.0


def _threads(pid: int) -> tuple[list[int], float]:
    """Returns the running children of a process, and how long its threads ran or were ready."""
    children: list[int] = []
    seconds = 0.0
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                children += map(int, (thread / "children").read_text().split())
            with contextlib.suppress(OSError, ValueError):
                ran, waited, _ = map(int, (thread / "schedstat").read_text().split())
                seconds += (ran + waited) / 1e9
    return children, seconds


def _io_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()[:2]  # rchar, wchar.
        return sum(int(line.split()[1]) for line in lines)
    return 0
