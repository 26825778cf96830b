"""Installs faults in a job's process, which are triggered at given points.

The library needs no code for faults: most are triggered by Python's audit events (PEP 578), which
report every file that is opened, renamed or removed by any code. A fault is JSON:

  {"at": "os.rename", "matches": REGEX, "nth": 1, "then": 0, "do": "KILL"}
      the nth event whose paths match, or `then` file changes after this event.
  {"at": "step", "nth": N, "do": ...}         after the process's Nth step, before it is saved.
  {"at": "batch", "index": N, "do": ...}      when the pipeline computes this training batch.
  {"at": "half a metrics line", "nth": N, "do": ...}
  {"at": "now", "do": ...}

Actions: "KILL", "TERM", "INT" (signals to the process itself), "KILL when saved" (after the save in
progress), "raise", "sys.exit", "sleep" (one second), "fill the disk" (after the save in progress,
with a file at `path`), "retry soon" (retry failed saves after a second).
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "open for writing"}


def install(faults: Sequence[Mapping[str, Any]]) -> None:
    """Installs faults in this process permanently."""
    for fault in faults:
        if fault["at"] == "step":
            _at_step(fault)
        elif fault["at"] == "batch":
            _at_batch(fault)
        elif fault["at"] == "now":
            _do(fault)
        elif fault["at"] == "half a metrics line":
            _in_metrics_line(fault)
        else:
            sys.addaudithook(_AtEvent(fault))


def _do(fault: Mapping[str, Any]) -> None:
    what = fault["do"]
    if what in ("KILL", "TERM", "INT"):
        os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
    elif what == "KILL when saved":
        _wait_for_saves()
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise RuntimeError("the plug was pulled")
    elif what == "sys.exit":
        sys.exit(7)
    elif what == "sleep":
        time.sleep(1)
    elif what == "fill the disk":
        _wait_for_saves()
        fill_disk(Path(fault["path"]))
    elif what == "retry soon":
        _retry_soon()
    else:
        raise ValueError(what)


def _wait_for_saves() -> None:
    while any(thread.name.startswith("save of") for thread in threading.enumerate()):
        time.sleep(0.01)


def fill_disk(path: Path) -> None:
    """Writes a file until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1 << 6, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


def _retry_soon() -> None:
    from praxis_lite.checkpoints.steps.save_settings import SaveSettings

    init = SaveSettings.__init__
    SaveSettings.__init__ = lambda self, **given: init(self, **{**given, "retry_seconds": 1.0})


class _AtEvent:
    def __init__(self, fault: Mapping[str, Any]):
        self._fault, self._seen, self._left = fault, 0, None
        self._pattern = re.compile(fault["matches"])

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            event = "open for writing" if writes else "open"
        if self._left is not None:
            if event in CHANGES:
                self._count_down()
        elif event == self._fault["at"] and self._pattern.search(_paths(args)):
            self._seen += 1
            if self._seen == self._fault.get("nth", 1):
                self._left = self._fault.get("then", 0) + 1
                self._count_down()

    def _count_down(self) -> None:
        self._left -= 1
        if self._left == 0:
            _do(self._fault)


def _paths(args: tuple[Any, ...]) -> str:
    return " ".join(os.fsdecode(x) for x in args if isinstance(x, str | bytes | os.PathLike))


def _at_step(fault: Mapping[str, Any]) -> None:
    from praxis_lite.job.processes.stop_request import StopRequest

    step_ended, result = StopRequest.step_ended, []

    def counted(self):
        step_ended(self)
        result.append(self)
        if len(result) == fault["nth"]:
            _do(fault)

    StopRequest.step_ended = counted


def _at_batch(fault: Mapping[str, Any]) -> None:
    from praxis_lite.inputs import InMemory

    rows = InMemory.rows

    def watched(self, index, which):
        if self.shuffle and index == fault["index"]:
            _do(fault)
        return rows(self, index, which)

    InMemory.rows = watched


def _in_metrics_line(fault: Mapping[str, Any]) -> None:
    from praxis_lite.trainer.metrics import json_lines
    from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter

    write, written = JsonLinesWriter.write, []

    def half(self, line):
        if self.path.name != "metrics.jsonl":
            return write(self, line)
        written.append(line)
        if len(written) != fault["nth"]:
            return write(self, line)
        text = json_lines.json_line(line)
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(part)
            if not part.endswith("\n"):
                _do(fault)

    JsonLinesWriter.write = half
