"""Reads execution counts and times of instructions from a trace of JAX's profiler.

The format depends on the platform. On CPU, the events of a thread name the instruction, program,
device and run. On GPU, the events in a device's streams are kernels, which name the program and
either the instruction or the graph that launched them. On TPU, each device has one line with
instructions, and one line with the programs that contain these instructions.
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
from praxis_lite.host.file_reading import content_of
from praxis_tools.profile.graphs import Schedule

_DEVICE = re.compile(r"/device:(?:TPU|GPU):(\d+)")
UNNAMED = ""  # Stands for the unknown instruction of a kernel.
_OPS, _MODULES = "XLA Ops", "XLA Modules"  # Lines in a TPU trace.


class Event(NamedTuple):
    """One execution of an instruction on a device, with times in nanoseconds.

    Attributes:
      run: ID of the run of the program, or None if the trace does not distinguish runs.
      kernel: Name of the kernel, on GPU.
      launch: ID of the launch of the kernel's graph, on GPU.
    """

    device: int
    module: str
    run: int | None
    op: str
    start: float
    end: float
    kernel: str = ""
    launch: int = 0


@dataclasses.dataclass
class OpTime:
    """The number of executions of an instruction on all devices, and their total seconds.

    If an instruction has several kernels, such as a library call, the number of executions is the
    count of its rarest kernel.
    """

    count: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trace:
    """The times of a program's instructions in a trace.

    Attributes:
      devices: IDs of the devices on which the program ran.
      ops: Maps the name of each instruction to its time. Kernels whose instruction is unknown have
        the name UNNAMED.
      run_seconds: Time from the first to the last instruction of each run of the program on a
        device; empty if the trace does not distinguish runs.
      span_seconds: Time from the first to the last instruction of all runs, summed over devices.
      busy_seconds: Time during which at least one instruction was running, summed over devices.
      other_seconds: Maps the name of each other program to the time of its instructions, summed
        over devices.
    """

    devices: frozenset[int]
    ops: dict[str, OpTime]
    run_seconds: list[float]
    span_seconds: float
    busy_seconds: float
    other_seconds: dict[str, float]


def read_trace(
    file: Path, module: str, containers: Iterable[str] = (), schedule: Schedule | None = None
) -> Trace:
    """Reads the instructions of a program from an `.xplane.pb` file.

    Args:
      file: Path of the trace.
      module: Name of the program, such as "jit__train_step".
      containers: Instructions that contain other instructions, such as loops, calls and branches.
        Their time is not counted.
      schedule: The schedule of the program, used to identify the kernels in CUDA graphs.

    Raises:
      ConfigError: The file cannot be read or does not contain the program.
    """
    try:
        trace = jax.profiler.ProfileData.from_serialized_xspace(content_of(file))
        planes = list(trace.planes)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read as a trace ({error}). Record another profile."
        ) from None
    with warnings.catch_warnings():
        # Python 3.13 warns that the type of an event has no __module__. If warnings are errors,
        # jaxlib 0.12 then aborts on the first access to the event's stats.
        warnings.simplefilter("ignore", DeprecationWarning)
        events = _instructions(_events(planes), module, schedule)
        trace = _summed(events, module, frozenset(containers))
    if not trace.devices:
        others = ", ".join(sorted(trace.other_seconds)) or "no program"
        raise ConfigError(
            f"{file}: the trace contains no instructions from {module}, only from {others}. "
            "The profiler's buffer may have overflowed; profile fewer steps."
        )
    return trace


def _instructions(
    events: Iterable[Event], module: str, schedule: Schedule | None
) -> Iterator[Event]:
    """Yields all events, adding the instructions of kernels launched by a graph."""
    graphs: dict[tuple[int, int, str], list[Event]] = collections.defaultdict(list)
    for event in events:
        is_known = schedule is None or event.op in schedule.names
        if event.kernel and _base(event.module) == module and not is_known:
            graphs[event.device, event.launch, event.op].append(event)
        else:
            yield event
    if schedule is None:  # Then there are no graphs.
        return
    for kernels in graphs.values():
        kernels.sort(key=lambda event: event.start)
        names = schedule.instructions_of(tuple(event.kernel for event in kernels))
        for event, name in zip(kernels, names, strict=True):
            yield event._replace(op=name or UNNAMED)


def _summed(events: Iterable[Event], module: str, containers: frozenset[str]) -> Trace:
    """Sums the times of the events in a program, and the times of all other programs."""
    ops: dict[str, OpTime] = collections.defaultdict(OpTime)
    kernels: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    other_seconds: dict[str, float] = collections.defaultdict(float)
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    intervals: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
    # Each event is an execution of an instruction. Only those of this program are counted by op.
    for event in events:
        seconds = (event.end - event.start) * 1e-9
        if _base(event.module) != module:
            # The contents of loops in other programs are counted twice, but such loops are rare.
            other_seconds[_base(event.module)] += seconds
            continue
        if event.run is not None:
            first, last = spans.get((event.device, event.run), (event.start, event.end))
            spans[event.device, event.run] = min(first, event.start), max(last, event.end)
        if event.op in containers:
            continue
        kernels[event.op][event.kernel] += 1
        ops[event.op].seconds += seconds
        intervals[event.device].append((event.start, event.end))
    for op, time in ops.items():
        time.count = min(kernels[op].values()) if op != UNNAMED else kernels[op].total()
    return Trace(
        frozenset(intervals),
        dict(ops),
        [(last - first) * 1e-9 for first, last in spans.values()],
        sum(map(_span, intervals.values())),
        sum(map(_covered, intervals.values())),
        dict(other_seconds),
    )


def _base(module: str) -> str:
    """Removes the suffix of a program's name on TPUs: "jit_step" for "jit_step(1234)"."""
    return module.partition("(")[0]


def _span(intervals: list[tuple[float, float]]) -> float:
    """Returns the seconds from the earliest start to the latest end of the intervals."""
    return (max(end for _, end in intervals) - min(start for start, _ in intervals)) * 1e-9


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals in seconds."""
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
            yield from _tpu_events(int(device[1]), lines[_OPS], lines[_MODULES])
            continue
        # A GPU's other lines repeat the events in its streams.
        streams = [line for name, line in lines.items() if name.startswith("Stream ")]
        for line in streams if device and streams else plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats:
                    continue
                ordinal = stats.get("device_ordinal", int(device[1]) if device else 0)
                yield Event(
                    int(ordinal),
                    str(stats.get("hlo_module", "")),
                    stats.get("run_id"),
                    str(stats["hlo_op"]),
                    event.start_ns,
                    event.start_ns + event.duration_ns,
                    event.name if device else "",
                    int(stats.get("correlation_id", 0)),
                )


def _tpu_events(device: int, ops: Any, modules: Any) -> Iterator[Event]:
    runs = sorted(
        (run.start_ns, run.start_ns + run.duration_ns, run.name) for run in modules.events
    )
    starts = [start for start, *_ in runs]
    for event in ops.events:
        # The event's name is "%fusion.1 = bf16[8,128] fusion(...)", or only "fusion.1".
        name = re.match(r"%?([\w.\-]+)", event.name)
        index = bisect.bisect_right(starts, event.start_ns) - 1
        if name is None or index < 0 or event.start_ns > runs[index][1]:
            continue
        yield Event(
            device,
            runs[index][2],
            index,
            name[1],
            event.start_ns,
            event.start_ns + event.duration_ns,
        )
