"""Hand-written profiler traces in the formats of three kinds of devices."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

# Name, start and duration in microseconds, and stats of an event.
HandMade = tuple[str, float, float, dict[str, Any]]


def write_trace(file: Path, planes: dict[str, dict[str, Sequence[HandMade]]]) -> Path:
    """Writes an `.xplane.pb` file from lines by name, grouped in planes by name."""
    text = "\n".join(_plane(name, lines) for name, lines in planes.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    return file


def _plane(name: str, lines: dict[str, Sequence[HandMade]]) -> str:
    numbers, stats = itertools.count(1), {}
    events = {event[0]: next(numbers) for line in lines.values() for event in line}
    for key in {key for line in lines.values() for event in line for key in event[3]}:
        stats[key] = next(numbers)
    parts = [f'name: "{name}"']
    for number, (line, items) in enumerate(lines.items()):
        made = " ".join(
            f"events {{ metadata_id: {events[label]} offset_ps: {int(start * 1e6)} "
            f"duration_ps: {int(duration * 1e6)} {_stats(given, stats)} }}"
            for label, start, duration, given in items
        )
        parts.append(f'lines {{ id: {number} name: "{line}" {made} }}')
    for key, kind in ((events, "event"), (stats, "stat")):
        parts += [
            f'{kind}_metadata {{ key: {number} value {{ id: {number} name: "{label}" }} }}'
            for label, number in key.items()
        ]
    return f"planes {{ {' '.join(parts)} }}"


def _stats(given: dict[str, Any], numbers: dict[str, int]) -> str:
    return " ".join(
        f"stats {{ metadata_id: {numbers[key]} "
        + (f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}")
        + " }"
        for key, value in given.items()
    )
