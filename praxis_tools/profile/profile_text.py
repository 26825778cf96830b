"""Formats a profile as tables: time by layer and by collective, memory by array."""

from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import format_bytes, printable
from praxis_lite.host.text_table import table_lines
from praxis_tools.plan.plan_text import seconds_text
from praxis_tools.profile.measured import Measured, Row
from praxis_tools.profile.peak_memory import PeakMemory

MAX_ROWS = 20
_COLUMNS = ("time", "share", "count", "predicted", "measured/predicted")


def profile_text(measured: Measured, memory: PeakMemory, max_rows: int = MAX_ROWS) -> str:
    """Formats the tables of a profile, with notes on how to read them.

    Args:
      measured: The measured times.
      memory: The breakdown of the peak memory.
      max_rows: Maximum number of rows in each of the tables of layers, collectives, arrays and
        temporaries.
    """
    facts = measured.facts
    devices = f"{len(facts.devices)} {facts.devices[0].device_kind} devices"
    if measured.num_devices < len(facts.devices):
        devices += f" ({measured.num_devices} of them traced)"
    total = Row(1, measured.step_seconds, measured.predicted_seconds)
    lines = [
        f"steps {facts.first_step} to {facts.last_step} on {devices}: means per step and device",
        "",
        *_time_table(measured, total, max_rows),
        "",
        *_memory_lines(memory, max_rows),
        *(f"note: {note}" for note in _notes(measured, memory)),
    ]
    return printable("\n".join(lines))


def _time_table(measured: Measured, total: Row, max_rows: int) -> list[str]:
    seconds = total.seconds
    collectives = {
        f"{kind} {'+'.join(axes) or '-'}  {layer}": row
        for (kind, axes, layer), row in measured.collectives.items()
    }
    rows: list[Sequence[str]] = [
        ("", *_COLUMNS),
        ("step", *_cells(total, seconds)),
        *_largest("layers", measured.layers, seconds, max_rows),
        *_largest("collectives", collectives, seconds, max_rows),
        ("no instruction ran", *_cells(Row(0, measured.idle_seconds), seconds)),
    ]
    return table_lines(rows, right=range(1, len(rows[0])))


def _largest(
    title: str, named: Mapping[str, Row], seconds: float, max_rows: int
) -> list[Sequence[str]]:
    """Returns a row for the total, followed by the rows with the largest times."""
    if not named:
        return [(f"no {title}", *[""] * len(_COLUMNS))]
    items = list(named.items())
    rows: list[Sequence[str]] = [(title, *_cells(_sum(list(named.values())), seconds))]
    rows += [(f"  {name}", *_cells(row, seconds)) for name, row in items[:max_rows]]
    if more := [row for _, row in items[max_rows:]]:
        rows.append((f"  {len(more)} more", *_cells(_sum(more), seconds)))
    return rows


def _sum(rows: Sequence[Row]) -> Row:
    predicted = [row.predicted for row in rows if row.predicted is not None]
    return Row(
        sum(row.count for row in rows),
        sum(row.seconds for row in rows),
        sum(predicted) if predicted else None,
    )


def _cells(row: Row, seconds: float) -> Sequence[str]:
    ratio = "-"
    if row.predicted:
        ratio = f"{row.seconds / row.predicted:.3g}"
    return (
        seconds_text(row.seconds),
        f"{row.seconds / seconds:.1%}" if seconds else "-",
        f"{row.count:.6g}" if row.count else "",
        "-" if row.predicted is None else seconds_text(row.predicted),
        ratio,
    )


def _memory_lines(memory: PeakMemory, max_rows: int) -> list[str]:
    rows: list[tuple[str, Any]] = [("peak memory per device during a step", memory.peak)]
    rows += [(f"  {name}", size) for name, size in _first(memory.arrays, max_rows)]
    rows += [
        ("  batch and other arguments", memory.batch),
        ("  outputs not in donated arguments", memory.outputs),
        ("  temporaries", memory.temporaries),
    ]
    rows += [(f"    {name}", size) for name, size in _first(memory.layers, max_rows)]
    if memory.layers:
        rest = memory.temporaries - sum(memory.layers.values())
        rows.append(("    in smaller buffers, or unused", max(0, rest)))
    cells = [(name, format_bytes(size), f"{size / max(memory.peak, 1):.1%}") for name, size in rows]
    return table_lines(cells, right=(1, 2))


def _first(sizes: Mapping[str, int], max_rows: int) -> list[tuple[str, int]]:
    items = list(sizes.items())
    more = items[max_rows:]
    rest = [(f"{len(more)} more", sum(size for _, size in more))] if more else []
    return [*items[:max_rows], *rest]


def _notes(measured: Measured, memory: PeakMemory) -> list[str]:
    device, notes = measured.facts.devices[0], []
    if measured.topology is None:
        notes.append(f"no predictions: the peak rates of {device.device_kind} are unknown")
    elif device.platform == "cpu":
        notes.append(
            "predictions assume a separate core for each simulated device, but here all devices "
            "share this machine's cores; most of a collective's time is waiting for other devices"
        )
    else:
        notes.append("the time of a collective includes waiting for other devices")
    if measured.other_seconds:
        others = sorted(measured.other_seconds.items(), key=lambda item: -item[1])
        times = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in others[:5])
        notes.append(f"other functions that ran between steps, per step and device: {times}")
    if memory.used is None:
        notes.append(f"peak memory in use: not reported on the platform {device.platform}")
    else:
        notes.append(
            "peak memory in use on a device since the start of the process: "
            f"{format_bytes(memory.used)}"
        )
    return notes
