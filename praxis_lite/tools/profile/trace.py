"""A trace of JAX's profiler, read: how often and how long each instruction ran on each device.

XLA writes it in one of three ways. On CPU a thread's events carry the instruction, the program, the
device and the run; on GPU the events of a device's streams carry the instruction and the program;
on TPU a device has a line of instructions, and a line of the programs around them.
"""

import bisect
import collections
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import content_of

_DEVICE = re.compile(r"/device:(?:TPU|GPU):(\d+)")
_OPS, _MODULES = "XLA Ops", "XLA Modules"  # Lines of a TPU.


class Event(NamedTuple):
    """An instruction that ran once on a device; times in nanoseconds."""

    device: int
    module: str
    run: int | None  # A number that the events of one run of the program share, if there is one.
    op: str
    start: float
    end: float


@dataclasses.dataclass
class OpTime:
    """The executions of an instruction on all devices, and their seconds together."""

    count: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trace:
    """The content of a trace, as far as a program's instructions go.

    Attributes:
      devices: those on which the program ran, by number.
      ops: of the program, by instruction.
      run_seconds: of each run of the program on a device, from the first instruction to the last;
        empty where the trace does not tell runs apart.
      busy_seconds: in which a device ran at least one instruction of the program, of all devices.
      other_seconds: of instructions of other programs, by program, of all devices.
    """

    devices: frozenset[int]
    ops: dict[str, OpTime]
    run_seconds: list[float]
    busy_seconds: float
    other_seconds: dict[str, float]


def read_trace(file: Path, module: str, containers: Iterable[str] = ()) -> Trace:
    """Returns a program's instructions in an `.xplane.pb`.

    Args:
      module: the program's name, "jit__train_step".
      containers: instructions whose time is that of others inside: loops, calls, branches.

    Raises:
      ConfigError: it cannot be read, or the program is not in it.
    """
    try:
        trace = jax.profiler.ProfileData.from_serialized_xspace(content_of(file))
        planes = list(trace.planes)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read as a trace ({error}). Make another profile."
        ) from None
    with warnings.catch_warnings():
        # jaxlib 0.12 ends the process where its first look at an event's stats is warned of by
        # Python 3.13 (a type without __module__), and warnings are errors.
        warnings.simplefilter("ignore", DeprecationWarning)
        trace = _summed(_events(planes), module, frozenset(containers))
    if not trace.devices:
        others = ", ".join(sorted(trace.other_seconds)) or "no program"
        raise ConfigError(
            f"{file}: the trace has no instruction of {module}, but {others}. The profiler may "
            "have run out of room: profile fewer steps."
        )
    return trace


def _summed(events: Iterable[Event], module: str, containers: frozenset[str]) -> Trace:
    ops: dict[str, OpTime] = collections.defaultdict(OpTime)
    other_seconds: dict[str, float] = collections.defaultdict(float)
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    intervals: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
    for event in events:
        seconds = (event.end - event.start) * 1e-9
        if _base(event.module) != module:
            # Loops of other programs are counted with what is in them; there are few.
            other_seconds[_base(event.module)] += seconds
            continue
        if event.run is not None:
            first, last = spans.get((event.device, event.run), (event.start, event.end))
            spans[event.device, event.run] = min(first, event.start), max(last, event.end)
        if event.op in containers:
            continue
        ops[event.op].count += 1
        ops[event.op].seconds += seconds
        intervals[event.device].append((event.start, event.end))
    return Trace(
        frozenset(intervals), dict(ops), [(last - first) * 1e-9 for first, last in spans.values()],
        sum(map(_covered, intervals.values())), dict(other_seconds),
    )


def _base(module: str) -> str:
    """Returns "jit_step" of "jit_step(1234)", as TPUs name a program."""
    return module.partition("(")[0]


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Returns the seconds that intervals cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total * 1e-9


def _events(planes: Iterable[Any]) -> Iterator[Event]:
    for plane in planes:
        device = _DEVICE.match(plane.name)
        lines = {line.name: line for line in plane.lines}
        if device and _OPS in lines and _MODULES in lines:
            yield from _of_tpu(int(device[1]), lines[_OPS], lines[_MODULES])
            continue
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats:
                    continue
                place = stats.get("device_ordinal", int(device[1]) if device else 0)
                yield Event(
                    int(place), str(stats.get("hlo_module", "")), stats.get("run_id"),
                    str(stats["hlo_op"]), event.start_ns, event.start_ns + event.duration_ns,
                )


def _of_tpu(device: int, ops: Any, modules: Any) -> Iterator[Event]:
    runs = sorted(
        (run.start_ns, run.start_ns + run.duration_ns, run.name) for run in modules.events
    )
    starts = [start for start, *_ in runs]
    for event in ops.events:
        # "%fusion.1 = bf16[8,128] fusion(...)", or its name alone.
        name = re.match(r"%?([\w.\-]+)", event.name)
        index = bisect.bisect_right(starts, event.start_ns) - 1
        if name is None or index < 0 or event.start_ns > runs[index][1]:
            continue
        yield Event(
            device, runs[index][2], index, name[1], event.start_ns,
            event.start_ns + event.duration_ns,
        )
