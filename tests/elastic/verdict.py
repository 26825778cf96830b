"""Compares a job whose hosts failed with an undisturbed run.

Each comparison is a row with the number of checks, details, and a message for each failure.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.checkpoints.stored_arrays import stored_arrays
from praxis_lite.checkpoints.tools import manifest_of
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.faults.outcome import Row, steps_of

# Absolute, which is stricter than relative, because the losses are between 1 and 7.
LOSS_TOLERANCE = 1e-5
# Tolerance relative to an array's largest element. Adam's steps accumulate the rounding errors of
# sums in a different order.
WEIGHT_TOLERANCE = 1e-4
# Columns that depend only on the step.
EXACT = ("learning_rate", "num_skipped_steps", "num_skipped_in_a_row")

Lines = Sequence[Mapping[str, Any]]


def verdict(
    job: Path, whole: Path, *, peer_steps: int, disk_steps: int, env: Mapping[str, str]
) -> list[Row]:
    """Returns a row for each comparison between two job directories.

    Args:
      job: Directory of the elastic job, with elastic.jsonl.
      whole: Directory of the undisturbed run, which has the same last step.
      peer_steps: Number of steps between peer saves.
      disk_steps: Number of steps between saves on disk.
      env: Environment of the job's processes.
    """
    names = ("metrics.jsonl", "eval_metrics.jsonl")
    (ours, evaluated), (theirs, expected) = (
        [read_json_lines(folder / name) for name in names] for folder in (job, whole)
    )
    return [
        each_step_once(ours),
        same_losses(ours, theirs),
        same_lost_steps(read_json_lines(job / "metrics.lost.jsonl"), theirs),
        same_evaluations(evaluated, expected),
        same_weights(job, whole),
        examples_once(job, env),
        little_lost(changes(job), peer_steps, disk_steps),
    ]


def each_step_once(lines: Lines) -> Row:
    """Checks that metrics.jsonl contains each step from 1 on exactly once, in order."""
    steps = [line["step"] for line in lines]
    row = Row("each step recorded once, in order", len(steps))
    row.failures += [
        f"step {step} occurs {times} times" for step, times in Counter(steps).items() if times > 1
    ]
    missing = sorted(set(range(1, max(steps, default=1) + 1)) - set(steps))
    if missing:
        row.failures.append(f"{len(missing)} steps are missing; the first is {missing[0]}")
    if steps != sorted(steps):
        row.failures.append("steps are out of order")
    return row


def same_losses(lines: Lines, expected: Lines) -> Row:
    """Compares the losses of all steps, and the columns that depend only on the step."""
    row = Row("losses equal to those of the undisturbed run", len(lines))
    if len(lines) != len(expected):
        row.failures.append(f"{len(lines)} steps, but the undisturbed run has {len(expected)}")
    for line, other in zip(lines, expected, strict=False):
        distance = abs(line["loss"] - other["loss"])
        row.most("largest difference", distance)
        if not distance <= LOSS_TOLERANCE:
            row.failures.append(
                f"step {line['step']}: loss {line['loss']}, undisturbed {other['loss']}"
            )
        row.failures += [
            f"step {line['step']}: {name} {line.get(name)}, undisturbed {other.get(name)}"
            for name in EXACT
            if line.get(name) != other.get(name)
        ]
    return row


def same_lost_steps(lost: Lines, expected: Lines) -> Row:
    """Compares the losses of steps that were lost and recomputed."""
    losses = {line["step"]: line["loss"] for line in expected}
    row = Row("losses of steps that were lost and recomputed", len(lost))
    for line in lost:
        distance = abs(line["loss"] - losses.get(line["step"], float("nan")))
        row.most("largest difference", distance)
        if not distance <= LOSS_TOLERANCE:
            row.failures.append(f"step {line['step']}: loss {line['loss']}")
    return row


def same_evaluations(lines: Lines, expected: Lines) -> Row:
    """Compares evaluations: their steps, datasets and losses."""
    row = Row("evaluation losses equal to those of the undisturbed run", len(lines))
    ours, theirs = (
        [(line["step"], line["dataset"]) for line in element] for element in (lines, expected)
    )
    if ours != theirs:
        odd = sorted((Counter(ours) - Counter(theirs)) + (Counter(theirs) - Counter(ours)))
        row.failures.append(
            f"{len(ours)} and {len(theirs)} evaluations; the first difference is {odd[:1]}"
        )
    for line, other in zip(lines, expected, strict=False):
        distance = abs(line["loss"] - other["loss"])
        row.most("largest difference", distance)
        if not distance <= LOSS_TOLERANCE:
            row.failures.append(
                f"step {line['step']}, {line['dataset']}: loss {line['loss']}, "
                f"undisturbed {other['loss']}"
            )
    return row


def same_weights(job: Path, whole: Path) -> Row:
    """Compares the last checkpoints: weights, slots, averages and counts."""
    row = Row("arrays of the last checkpoint")
    last, other_last = (max(steps_of(folder), default=0) for folder in (job, whole))
    if not last or last != other_last:
        row.failures.append(
            f"the last checkpoint is of step {last}, in the undisturbed run of step {other_last}"
        )
        return row
    arrays, expected = (_values(folder / f"checkpoints/{last}") for folder in (job, whole))
    compare_arrays(row, arrays, expected)
    return row


def compare_arrays(
    row: Row, arrays: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> None:
    """Adds the differences from the arrays of the undisturbed run to a row."""
    if arrays.keys() != expected.keys():
        row.failures.append(
            f"arrays in only one of the runs: {sorted(arrays.keys() ^ expected.keys())}"
        )
    for path in sorted(arrays.keys() & expected.keys()):
        row.tried += 1
        x, y = arrays[path], expected[path]
        if x.shape != y.shape or x.dtype != y.dtype:
            row.failures.append(f"{path}: {x.dtype}{x.shape}, undisturbed {y.dtype}{y.shape}")
        elif x.dtype.kind != "f":
            if not np.array_equal(x, y):
                row.failures.append(f"{path}: {x}, undisturbed {y}")
        else:
            scale = max(float(np.abs(y).max(initial=0.0)), 1e-30)
            distance = float(np.abs(x - y).max(initial=0.0)) / scale
            row.most("largest difference relative to an array's largest element", distance)
            if not distance <= WEIGHT_TOLERANCE:
                row.failures.append(f"{path}: differs by {distance:.3g} of its largest element")


def _values(step_dir: Path) -> dict[str, np.ndarray]:
    return {
        array.path: array.read()
        for array in stored_arrays(step_dir, manifest_of(step_dir)).values()
    }


def examples_once(job: Path, env: Mapping[str, str]) -> Row:
    """Runs `praxis inputs digest --job`, which verifies the examples."""
    row = Row("every example used exactly once, in order", 1)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "praxis_lite",
            "inputs",
            "digest",
            f"--job={job}",
            "--packages=elasticzoo",
        ],
        capture_output=True,
        text=True,
        env=env,
    )
    row.figures["last line of `inputs digest`"] = (done.stdout.splitlines() or [""])[-1]
    if done.returncode:
        row.failures.append(f"status {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    elif f"\nsteps 1 to {max(steps_of(job), default=0)}: batches" not in f"\n{done.stdout}":
        row.failures.append(f"does not cover all steps: {done.stdout[-1000:]}")
    return row


def changes(job: Path) -> list[dict[str, Any]]:
    """Returns the lines of elastic.jsonl."""
    path = job / "elastic.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def little_lost(lines: Lines, peer_steps: int, disk_steps: int) -> Row:
    """Checks the number of steps lost at each regrouping.

    No step may be lost when a host joins or leaves. If one host dies after its generation has
    completed a peer save, at most the steps between two peer saves may be lost. Otherwise, for
    example if two hosts die at once, at most the steps between two saves on disk may be lost.
    """
    row = Row("at most one save interval lost per regrouping")
    before = None
    for line in lines:
        if line["reached"] and line["kind"] != "start":
            row.tried += 1
            kind, lost = line["kind"], line["lost_steps"]
            made = 0 if before is None else line["from_step"] + lost - before["from_step"]
            most = disk_steps
            if kind in ("came", "left"):
                most = 0
            elif len(line["who"]) == 1 and made >= peer_steps and len(before["members"]) > 1:
                most = peer_steps
            row.most(f"most steps lost ({kind}, from {line['source']})", lost)
            if lost > most:
                row.failures.append(
                    f"generation {line['generation']} ({line['why']}): {lost} steps lost, resuming "
                    f"from step {line['from_step']} of {line['source']}; expected at most {most}"
                )
        before = line if line["reached"] else None
    return row
