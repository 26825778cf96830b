"""Reads the state and the work of a process from the operating system of its host."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_tools.stuck.progress import Progress, own

_TICKS = os.sysconf("SC_CLK_TCK")
_STATES = {
    "R": "runs", "S": "sleeps", "D": "waits for a disk or a network file system",
    "T": "is stopped by a signal", "t": "is stopped by a debugger",
}


def own_progress(process: int) -> Progress:
    """Returns the progress of this process, given its index in the job; callable in any thread."""
    return _with_work(own.progress_of(process), os.getpid())


def seen_by_host(
    pid: int, told: Mapping[str, Any], process: int, unheard_seconds: float
) -> Progress:
    """Returns the progress of another process of this host, such as a supervisor's worker.

    Args:
      pid: The process ID.
      told: The fields of `Progress` in its last report; empty before the first report.
      process: Its index in the generation.
      unheard_seconds: Time since the report, or since the process was started.
    """
    progress = Progress(**{"doing": "import", **told, "process": process})
    return _with_work(dataclasses.replace(
        progress, unheard_seconds=unheard_seconds,
        silent_seconds=progress.silent_seconds + unheard_seconds,
    ), pid)


def state_in_words(pid: int) -> str:
    """Describes the state of a running process of this host; returns "" if it is unknown."""
    words = []
    if (state := _stat(pid)[0]) not in ("", "Z"):
        words.append(f"it {_STATES.get(state, 'lives')} (state {state})")
    with contextlib.suppress(OSError):
        if words and (place := Path(f"/proc/{pid}/wchan").read_text()) not in ("", "0"):
            words.append(f"in the kernel's {place}")
    return ", ".join(words)


def _with_work(progress: Progress, pid: int) -> Progress:
    state, cpu_seconds = _stat(pid)
    children, ready_seconds = _threads(pid)
    while children:
        child = children.pop()
        more, ready = _threads(child)
        children += more
        cpu_seconds, ready_seconds = cpu_seconds + _stat(child)[1], ready_seconds + ready
    return dataclasses.replace(
        progress, state=state, cpu_seconds=round(cpu_seconds, 2),
        ready_seconds=round(ready_seconds, 2), io_bytes=_io_bytes(pid),
    )


def _stat(pid: int) -> tuple[str, float]:
    """Returns the state of a process, and the CPU seconds of it and its exited children."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name of the program, in parentheses, may contain spaces and parentheses.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[0], sum(map(int, fields[11:15])) / _TICKS
    return "", 0.0


def _threads(pid: int) -> tuple[list[int], float]:
    """Returns the running children of a process, and the seconds its threads ran or were ready."""
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
