"""What is compared of a job with one that nothing happened to, and the rows of the report."""

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
# What a save, a deletion or a rewritten file leaves where it was broken off.
TEMPORARY = re.compile(r"\.(saving|deleting|new|tmp)\b|orbax-checkpoint-tmp|^\.(config|layout)")


@dataclasses.dataclass
class Row:
    """A row of the report: how often a fault was tried, and what came of it.

    Attributes:
      what: the fault.
      tried: how often.
      figures: what was measured besides, such as {"steps lost": "at most 5"}.
      failures: a sentence for each try that did not end as it must.
    """

    what: str
    tried: int = 0
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)

    def most(self, name: str, value: float) -> None:
        """Keeps the largest value of a figure."""
        self.figures[name] = max(self.figures.get(name, value), value)

    def line(self) -> str:
        """Returns the row in words."""
        figures = "".join(f", {name} {value}" for name, value in self.figures.items())
        return f"{self.what}: {self.tried - len(self.failures)} of {self.tried}{figures}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All of a finished job that does not depend on the clock."""

    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    digests: Mapping[int, str]

    def differences(self, other: "Outcome", *, all_steps: bool = True) -> list[str]:
        """Returns in sentences how this one differs from `other`, which nothing happened to.

        Args:
          all_steps: compare all steps that stayed, not the last one only.
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
            actual.append(f"digests differ: {digests}, wanted {expected}")
        return actual


def outcome_of(job: Path) -> Outcome:
    """Returns the outcome of a job's directory."""
    metrics, evaluations = (
        [
            {name: value for name, value in line.items() if name not in CLOCKS}
            for line in read_json_lines(job / file)
        ]
        for file in ("metrics.jsonl", "eval_metrics.jsonl")
    )
    return Outcome(metrics, evaluations, digests_of(job))


def steps_of(job: Path) -> list[int]:
    """Returns the steps: the folders with plain numbers for names."""
    names = [path.name for path in (job / "checkpoints").glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def digests_of(job: Path) -> dict[int, str]:
    """Returns the digest of the values of each step of a job."""
    return {step: digest_of(job / "checkpoints" / str(step)) for step in steps_of(job)}


def temporary_files(job: Path) -> list[str]:
    """Returns the files that a broken-off write has left in a job's directory."""
    paths = (path.relative_to(job) for path in job.rglob("*"))
    return sorted(str(path) for path in paths if TEMPORARY.search(path.name))


def last_step(job: Path) -> int:
    """Returns the step of the last whole line of metrics.jsonl, or 0 if there is no line."""
    path = job / "metrics.jsonl"
    lines = read_json_lines(path) if path.exists() else []
    return lines[-1]["step"] if lines else 0


def restored_step(launch: Launch) -> int | None:
    """Returns the step that a launch went on from, 0 for a new job, None if it got not so far."""
    actual = re.search(r"restored the checkpoint of step (\d+)", launch.out)
    if actual:
        return int(actual[1])
    return 0 if "initializing the state" in launch.out else None


def tail(launch: Launch) -> str:
    """Returns the end of what a launch printed, on one line."""
    words = f"{launch.out[-300:]} | {launch.err[-600:]}"
    return f"status {launch.code}: " + " / ".join(words.splitlines())


def report_lines(title: str, rows: Iterable[Row]) -> list[str]:
    """Returns a section of the report."""
    lines = [f"## {title}", "", "| fault | tried | as it must be | figures |", "|---|---|---|---|"]
    for row in rows:
        figures = "; ".join(f"{name}: {value}" for name, value in row.figures.items())
        lines.append(f"| {row.what} | {row.tried} | {row.tried - len(row.failures)} | {figures} |")
    lines.append("")
    for row in rows:
        lines += [f"- FAILED, {row.what}: {failure}" for failure in row.failures]
    return lines
