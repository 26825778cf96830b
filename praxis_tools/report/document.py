"""Builds the JSON document that contains the data of a report's HTML page.

Arrays are encoded in Base64 as little-endian float32, and axes as float64. This preserves NaN and
infinities, and is a third of the size of decimal text.
"""

import base64
import datetime
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.trainer.metrics.json_lines import strict_json
from praxis_tools.elastic.generation_log import GenerationRecord
from praxis_tools.goodput.goodput import Goodput
from praxis_tools.report.curves import (
    Buckets,
    at_steps,
    buckets_of,
    progress_axes,
    with_extremes,
)
from praxis_tools.report.job_reader import JobState, truncated
from praxis_tools.report.step_certificates import failed, summary

# Columns with the time that a step spends on each activity, in the order in which they are drawn.
SPENT = ("input_time", "dispatch_time", "device_time", "save_time", "evaluation_time")
# Columns with events at individual steps, which are marked on the page.
MARKS = {"skipped": "num_skipped_in_a_row", "spikes": "is_loss_spike"}
_NO_METRICS = {"step", *SPENT, *MARKS.values(), "num_skipped_steps", "num_skipped_batches"}
# (total Base64 bytes, minimum points per curve, maximum points per curve) for training curves and
# for evaluation curves. The page stays below 5 MB, with more points than a screen can show.
_CURVES_BUDGET, _EVALUATIONS_BUDGET = (3_000_000, 50, 2_000), (1_000_000, 11, 500)
_MAX_METRICS, _MAX_MARKS, _MAX_ARRAYS = 80, 300, 12
_AXES_BYTES = 3 * 8  # Bytes per point for the axes.
_MAX_DIFFERENCES = 500
_MAX_VALUE_CHARS = 300  # Config values can be long, for example lists of files.
MAX_CHARS_OF_SAMPLES = 600_000  # Maximum total number of characters in the samples.


def document(
    jobs: Sequence[JobState], *, written: datetime.datetime, reload_seconds: float | None
) -> dict[str, Any]:
    """Returns the data of a report as strict JSON values.

    Args:
      jobs: Snapshots of the jobs.
      written: Time at which the jobs were read, with a time zone.
      reload_seconds: Interval at which an open page reloads itself, or None for never.
    """
    names = metric_names(jobs)
    drawn = names[:_MAX_METRICS]
    # A bucket contains the mean, minimum and maximum of a metric, but only the mean of a time.
    num_values = sum(3 * (name in job.columns) for job in jobs for name in drawn)
    num_values += sum(name in job.columns for job in jobs for name in SPENT)
    num_buckets = _num_points(len(jobs) * _AXES_BYTES + 4 * num_values, _CURVES_BUDGET)
    num_curves = sum(len(columns) for job in jobs for columns in job.evaluations.values())
    num_evaluations = _num_points(num_curves * (_AXES_BYTES + 4), _EVALUATIONS_BUDGET)
    rows, num_equal = config_differences([job.config for job in jobs])
    notes = [f"{job.name}: {note}" for job in jobs for note in job.notes]
    if len(names) > _MAX_METRICS:
        notes.append(f"Only the first {_MAX_METRICS} of {len(names)} metrics are drawn.")
    if len(rows) > _MAX_DIFFERENCES:
        notes.append(
            f"Only the first {_MAX_DIFFERENCES} of {len(rows)} differing settings are shown."
        )
    return {
        "written": written.strftime("%Y-%m-%d %H:%M:%S %Z").strip(),
        "reload_seconds": reload_seconds,
        "metrics": drawn,
        "spent": SPENT,
        "jobs": [_job(job, drawn, num_buckets, num_evaluations) for job in jobs],
        "config": {"rows": rows[:_MAX_DIFFERENCES], "num_equal": num_equal},
        "notes": notes,
    }


def metric_names(jobs: Sequence[JobState]) -> list[str]:
    """Returns all metric names: "loss" first, then by the number of jobs with the metric."""
    counts: dict[str, int] = {}
    for job in jobs:
        evaluated = [name for columns in job.evaluations.values() for name in columns]
        for name in dict.fromkeys([*job.columns, *evaluated]):
            if name not in _NO_METRICS:
                counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: (name != "loss", -counts[name]))


def config_differences(
    configs: Sequence[Mapping[str, str]],
) -> tuple[list[tuple[str, list[str | None]]], int]:
    """Compares the settings of several configs.

    Args:
      configs: Maps the path of each setting to its value. An empty dict means that the config is
        unknown; such configs are not compared.

    Returns:
      (differences, num_equal): The path of each setting that differs, with its value in every
      config (None if missing, truncated if long), and the number of settings that are the same in
      every config.
    """
    known = [bool(config) for config in configs]
    paths = list(dict.fromkeys(path for config in configs for path in config))
    values = {path: [config.get(path) for config in configs] for path in paths}
    differing = [
        (path, [value and truncated(value, _MAX_VALUE_CHARS) for value in values[path]])
        for path in paths
        if len(set(itertools.compress(values[path], known))) > 1
    ]
    return differing, len(paths) - len(differing)


def _num_points(bytes_per_point: int, budget: tuple[int, int, int]) -> int:
    num_bytes, min_points, max_points = budget
    num_points = num_bytes * 3 // (4 * max(bytes_per_point, 1))  # Base64 adds a third.
    return min(max(num_points, min_points), max_points)


def _job(
    job: JobState, names: Sequence[str], num_buckets: int, num_evaluations: int
) -> dict[str, Any]:
    axes = progress_axes(job.columns)
    # Each curve is reduced to buckets of lines, to limit the size of the page.
    buckets = buckets_of(len(job.columns["step"]), num_buckets)
    arrays, totals = job.layout
    largest = sorted(arrays, key=lambda array: -array.num_bytes)
    # The steps to mark in the curves, by kind of event.
    marked = {kind: job.steps_where(column) for kind, column in MARKS.items()}
    marked["restarts"] = job.restarts
    marked["regroupings"] = np.array([change.from_step for change in job.regroupings], float)
    differing = {item.step for item in failed(job.certificates)}
    certified = {item.step for item in job.certificates} - differing
    marked["certified"] = np.array(sorted(certified), float)
    marked["differences"] = np.array(sorted(differing), float)
    marks = {
        kind: {"num": len(steps), **_axes(at_steps(axes, steps[:_MAX_MARKS]))}
        for kind, steps in marked.items()
        if len(steps)
    }
    return {
        "name": job.name,
        "path": job.path,
        "experiment": job.experiment,
        "state": job.state,
        "last_step": job.last_step,
        "num_train_steps": job.num_train_steps,
        "num_lines": buckets.num_lines,
        "axes": _axes({name: axis[buckets.ends] for name, axis in axes.items()}),
        "metrics": {
            name: _curve(job.columns[name], buckets) for name in names if name in job.columns
        },
        "last": {
            name: strict_json(job.columns[name][-1], name)
            for name in names
            if name in job.columns and buckets.num_lines
        },
        "spent": {
            name: _base64(buckets.means(job.columns[name]))
            for name in SPENT
            if name in job.columns and buckets.num_lines
        },
        "evaluations": {
            dataset: {
                name: _evaluation(columns["step"], values, axes, num_evaluations)
                for name, values in columns.items()
                if name != "step"
            }
            for dataset, columns in job.evaluations.items()
        },
        "marks": marks,
        "samples": job.samples,
        "profiles": job.profiles,
        "goodput": job.goodput and _goodput(job.goodput),
        "regroupings": [_change(change, axes) for change in job.changes[-_MAX_MARKS:]],
        "devices": _devices(job, axes),
        "certificates": summary(job.certificates) if job.certificates else "",
        "differences": [
            [item.step, item.difference] for item in failed(job.certificates)[:_MAX_MARKS]
        ],
        "layout": {
            "totals": totals,
            "num_arrays": len(arrays),
            "largest": [vars(array) for array in largest[:_MAX_ARRAYS]],
        },
    }


def _curve(values: np.ndarray, buckets: Buckets) -> dict[str, str]:
    """Returns the "mean", "min" and "max" of each bucket; only "mean" if buckets have one line."""
    if not len(values):
        return {"mean": ""}
    if buckets.are_lines:
        return {"mean": _base64(values)}
    return {
        "mean": _base64(buckets.means(values)),
        "min": _base64(buckets.lowest(values)),
        "max": _base64(buckets.highest(values)),
    }


def _evaluation(
    steps: np.ndarray, values: np.ndarray, axes: Mapping[str, np.ndarray], max_points: int
) -> dict[str, Any]:
    indices = with_extremes(values, max_points)
    return {
        "num": len(values),
        "axes": _axes(at_steps(axes, steps[indices])),
        "values": _base64(values[indices]),
    }


def _change(change: GenerationRecord, axes: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns a generation as JSON values; "axes" is None if the generation completed no step."""
    at = None
    if change.from_step is not None and change.reached:
        at = _axes(at_steps(axes, np.array([change.from_step], float)))
    return strict_json(
        {
            "generation": change.generation,
            "kind": change.kind,
            "why": change.why,
            "from_step": change.from_step,
            "source": change.source,
            "lost": change.lost_steps or 0,
            "devices": change.num_devices,
            "mesh": ", ".join(f"{axis} {size}" for axis, size in (change.mesh or {}).items()),
            "reached": change.reached,
            "seconds": dict(change.seconds),
            "total": change.total,
            "axes": at,
        },
        "regroupings",
    )


def _devices(job: JobState, axes: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """Returns how the number of devices changed over time, or None for a non-elastic job."""
    known = [
        change
        for change in job.changes
        if change.reached and change.from_step is not None and change.num_devices
    ][-_MAX_MARKS:]
    if not known:
        return None
    steps = np.array([change.from_step for change in known], float)
    # If steps were repeated, show only the devices of the last repetition.
    is_valid = np.minimum.accumulate(steps[::-1])[::-1] >= steps
    return {
        "axes": _axes(at_steps(axes, steps[is_valid])),
        "num": [change.num_devices for change, valid in zip(known, is_valid, strict=True) if valid],
    }


def _goodput(goodput: Goodput) -> dict[str, Any]:
    return strict_json(
        {
            "seconds": dict(goodput.seconds),
            "total": goodput.total_seconds,
            "launches": [
                {
                    "began": launch.began,
                    "ended": launch.ended,
                    "first_step": launch.first_step,
                    "last_step": launch.last_step,
                    "ended_by": launch.ended_by,
                }
                for launch in goodput.launches
            ],
        },
        "goodput",
    )


def _axes(axes: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {name: _base64(axis, "<f8") for name, axis in axes.items()}


def _base64(values: np.ndarray, dtype: str = "<f4") -> str:
    with np.errstate(over="ignore"):  # Values outside the range of float32 become infinite.
        return base64.b64encode(values.astype(dtype).tobytes()).decode()
