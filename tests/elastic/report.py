"""Formats the report on a chaos run: comparisons, events, and seconds to the next step."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.faults.outcome import Row

PARTS = ("notice", "agree", "start", "connect", "init", "restore", "compile", "first_step")

Lines = Sequence[Mapping[str, Any]]


def report_lines(
    rows: Sequence[Row], events: Lines, seconds: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> list[str]:
    """Returns all tables in Markdown."""
    return [*_table_of_rows(rows), "", *_table_of_events(events), "", *table(seconds)]


def _table_of_rows(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| comparison with an undisturbed run | checks | passed | details |",
        "|---|---:|---:|---|",
    ]
    for row in rows:
        figures = "; ".join(
            f"{name}: {value:.2g}" if isinstance(value, float) else f"{name}: {value}"
            for name, value in row.figures.items()
        )
        lines.append(f"| {row.what} | {row.tried} | {row.tried - len(row.failures)} | {figures} |")
    failures = [f"- FAILED, {row.what}: {one}" for row in rows for one in row.failures[:20]]
    return lines + (["", *failures] if failures else [])


def events_row(lines: Lines) -> Row:
    """Returns the row for events, which counts the events that the job survived."""
    row = Row("kills, stops and returns that the job survived", len(lines))
    row.failures += [
        f"event {line['event']}, {line['what']} {line['who']} in {line['during']}: "
        f"{'; '.join(line['failures'])}"
        for line in lines
        if not line["survived"]
    ]
    return row


def _table_of_events(lines: Lines) -> list[str]:
    """Returns a Markdown table with the counts, times and job activities for each kind of event."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(line["what"].partition(", aimed")[0], []).append(line)
    rows = [
        "| event | survived | seconds to the next step: median, maximum | activity of the job |",
        "|---|---:|---:|---|",
    ]
    for what, of_kind in sorted(kinds.items()):
        seconds = [line["seconds"] for line in of_kind if line["seconds"] is not None]
        times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
        during = Counter(line["during"] or "unknown" for line in of_kind)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(during.items()))
        survived = sum(line["survived"] for line in of_kind)
        rows.append(f"| {what} | {survived} of {len(of_kind)} | {times} | {counts} |")
    return rows


def seconds_by_part(lines: Lines) -> dict[str, dict[str, dict[str, float]]]:
    """Maps (kind of change, phase or "total") to {"median": ..., "worst": ...} in seconds."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    by_kind: dict[str, list[Mapping[str, float]]] = {}
    for line in lines:
        if line["reached"] and line["kind"] != "start":
            by_kind.setdefault(line["kind"], []).append(line["seconds"])
            by_kind.setdefault("all", []).append(line["seconds"])
    for kind, seconds in sorted(by_kind.items()):
        parts = [*PARTS, *sorted({name for one in seconds for name in one} - {*PARTS, "total"})]
        result[kind] = {
            part: {
                "median": statistics.median(one.get(part, 0.0) for one in seconds),
                "worst": max(one.get(part, 0.0) for one in seconds),
            }
            for part in (*parts, "total")
        }
        result[kind]["total"]["count"] = len(seconds)
    return result


def table(seconds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Returns `seconds_by_part` as the lines of a Markdown table."""
    kinds = list(seconds)
    lines = [
        "| seconds, median / maximum | "
        + " | ".join(f"{kind} ({int(seconds[kind]['total']['count'])})" for kind in kinds)
        + " |",
        "|---|" + "---:|" * len(kinds),
    ]
    parts = list(dict.fromkeys(part for kind in kinds for part in seconds[kind]))
    parts.sort(key=lambda part: part == "total")
    for part in parts:
        values = (seconds[kind].get(part, {"median": 0.0, "worst": 0.0}) for kind in kinds)
        cells = (f"{one['median']:.2f} / {one['worst']:.2f}" for one in values)
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return lines
