"""The results of `make check-defects`: all of them in results.tsv, and a summary as a page."""

import collections
import csv
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("results.tsv")
_INTRODUCTION = """\
`make check-defects` plants defects in models, learners, data and saved jobs, one at a time and in
memory, and runs `praxis check` ([check.md](check.md)) on a small experiment with each of them. This
page summarizes the results, which the command writes to `tests/tools/check/defects/results.tsv`;
the latest are from {date}.

Each defect is checked on one mesh of simulated devices, with the part of the check that is meant to
detect it. A defect counts as detected if the check fails and, where the defect is in one layer or
along one mesh axis, names that layer and axis."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a check of an experiment with a planted defect.

    Attributes:
      kind: Key of the defect in `FAMILIES`.
      defect: Name of the defect.
      parts: Names of the parts of the check that were run, separated by commas.
      comparison: Name of the first comparison that failed, or "".
      leaf: Leaf with the largest difference, or "".
      layer: Layer that the check named, or "".
      axis: Mesh axis that the check named, or "".
      missed: What the check failed to detect, or "".
      date: Date of the check, as YYYY-MM-DD.
    """

    kind: str
    defect: str
    parts: str
    comparison: str
    leaf: str
    layer: str
    axis: str
    missed: str
    date: str


_FIELDS = [field.name for field in dataclasses.fields(Result)]


def read_results() -> dict[str, Result]:
    """Returns the stored results by the names of the defects."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {row["defect"]: Result(**row) for row in csv.DictReader(file, delimiter="\t")}


def write_results(results: Iterable[Result]) -> None:
    """Replaces the stored results."""
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(_FIELDS)
        writer.writerows(dataclasses.astuple(result) for result in results)


def page(results: Sequence[Result]) -> str:
    """Returns the text of docs/check_defects.md."""
    detected = [result for result in results if not result.missed]
    missed = [result for result in results if result.missed]
    by_kind, by_part = _grouped(results, "kind"), _grouped(results, "parts")
    by_comparison = _grouped(detected, "comparison")
    lines = [
        f"# Planted defects: {len(detected)} of {len(results)} detected",
        "",
        _INTRODUCTION.format(date=max(result.date for result in results)),
        "",
        "## By kind of defect",
        "",
        *_table(
            ("kind of defect", "planted", "detected", "first comparison that failed"),
            (
                (kind, len(group), sum(not result.missed for result in group), _comparisons(group))
                for kind, group in by_kind.items()
            ),
        ),
        "",
        "## By part of the check",
        "",
        *_table(
            ("part of the check", "planted", "detected", "kinds of defects"),
            (
                (
                    part,
                    len(group),
                    sum(not result.missed for result in group),
                    "; ".join(_grouped(group, "kind")),
                )
                for part, group in by_part.items()
            ),
        ),
        "",
        "## Comparisons that detect a single defect",
        "",
        "Each of these comparisons was the first to fail for one defect only:",
        "",
        *_table(
            ("comparison", "defect"),
            (
                (comparison, group[0].defect)
                for comparison, group in by_comparison.items()
                if len(group) == 1
            ),
        ),
        "",
        "## Defects that were not detected",
        "",
    ]
    if missed:
        rows = ((result.kind, result.defect, result.missed) for result in missed)
        lines += _table(("kind of defect", "defect", "what the check missed"), rows)
    else:
        lines.append("None.")
    return "\n".join(lines) + "\n"


def _grouped(results: Iterable[Result], field: str) -> Mapping[str, list[Result]]:
    groups = collections.defaultdict(list)
    for result in results:
        groups[getattr(result, field)].append(result)
    return groups


def _comparisons(results: Iterable[Result]) -> str:
    """Returns how often each comparison was the first to fail, without its variants."""
    counts = collections.Counter(
        result.comparison.partition(", ")[0] for result in results if result.comparison
    )
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, cells))} |" for cells in lines]
