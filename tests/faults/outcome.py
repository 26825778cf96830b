"""Compares a job with an undisturbed job, and formats the rows of the report."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.digest import digest_of
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_lite.trainer.metrics.step_times import TIMES
from tests.faults.zygote import Launch

CLOCKS = {*TIMES, "examples_per_second"}
# Names of files that an interrupted save, deletion or rewrite leaves behind.
TEMPORARY = re.compile(r"\.(saving|deleting|new|tmp)\b|orbax-checkpoint-tmp|^\.(config|layout)")


@dataclasses.dataclass
class Row:
    """A row of the report, with the results for one kind of fault.

    Attributes:
      what: Description of the fault.
      tried: Number of trials.
      figures: Additional measurements, such as {"max. steps lost": 5}.
      failures: A message for each trial that failed.
    """

    what: str
    tried: int = 0
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)

    def most(self, name: str, value: float) -> None:
        """Updates a measurement to the maximum of its current value and `value`."""
        self.figures[name] = max(self.figures.get(name, value), value)

    def line(self) -> str:
        """Formats the row as a line of text."""
        figures = "".join(f", {name} {value}" for name, value in self.figures.items())
        return f"{self.what}: {self.tried - len(self.failures)} of {self.tried}{figures}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a finished job that do not depend on the clock."""

    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    digests: Mapping[int, str]

    def differences(self, other: "Outcome", *, all_steps: bool = True) -> list[str]:
        """Returns messages about the differences from an undisturbed job.

        Args:
          other: Outcome of the undisturbed job.
          all_steps: Whether to compare all retained checkpoints instead of only the last.
        """
        actual = []
        for name in ("metrics", "evaluations"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                steps = [a.get("step") for a, b in zip(ours, theirs, strict=False) if a != b]
                where = f"first at step {steps[0]}" if steps else f"{len(ours)}, {len(theirs)}"
                actual.append(f"{name} differ: {where}")
        last = max(other.digests)
        digests, expected = dict(self.digests), dict(other.digests)
        if digests != expected if all_steps else digests.get(last) != expected[last]:
            actual.append(f"digests differ: {digests}, expected {expected}")
        return actual


def outcome_of(job: Path) -> Outcome:
    """Returns the outcome of the job in a directory."""
    metrics, evaluations = (
        [
            {name: value for name, value in line.items() if name not in CLOCKS}
            for line in read_json_lines(job / file)
        ]
        for file in ("metrics.jsonl", "eval_metrics.jsonl")
    )
    return Outcome(metrics, evaluations, digests_of(job))


def steps_of(job: Path) -> list[int]:
    """Returns the saved steps, that is, the folders whose names are plain numbers."""
    names = [path.name for path in (job / "checkpoints").glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def digests_of(job: Path) -> dict[int, str]:
    """Returns the digest of each saved step's values."""
    return {step: digest_of(job / "checkpoints" / str(step)) for step in steps_of(job)}


def temporary_files(job: Path) -> list[str]:
    """Returns the files that interrupted writes left in a job directory."""
    paths = (path.relative_to(job) for path in job.rglob("*"))
    return sorted(str(path) for path in paths if TEMPORARY.search(path.name))


def last_step(job: Path) -> int:
    """Returns the step of the last complete line in metrics.jsonl, or 0 if there is no line."""
    path = job / "metrics.jsonl"
    lines = read_json_lines(path) if path.exists() else []
    return lines[-1]["step"] if lines else 0


def restored_step(launch: Launch) -> int | None:
    """Returns the step that a launch restored: 0 for a new job, None if it ended before that."""
    actual = re.search(r"restored the checkpoint of step (\d+)", launch.out)
    if actual:
        return int(actual[1])
    return 0 if "initializing the state" in launch.out else None


def tail(launch: Launch) -> str:
    """Returns the exit status and the end of the output of a launch in one line."""
    words = f"{launch.out[-300:]} | {launch.err[-600:]}"
    return f"status {launch.code}: " + " / ".join(words.splitlines())


def report_lines(title: str, rows: Iterable[Row]) -> list[str]:
    """Returns a section of the report."""
    lines = [f"## {title}", "", "| fault | trials | passed | details |", "|---|---|---|---|"]
    for row in rows:
        figures = "; ".join(f"{name}: {value}" for name, value in row.figures.items())
        lines.append(f"| {row.what} | {row.tried} | {row.tried - len(row.failures)} | {figures} |")
    lines.append("")
    for row in rows:
        lines += [f"- FAILED, {row.what}: {failure}" for failure in row.failures]
    return lines
