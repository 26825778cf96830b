"""Formats a report as text for a terminal."""

import itertools
from collections.abc import Sequence

import numpy as np

from praxis_lite.core.errors import first_few, printable, shortened
from praxis_lite.host.text_table import table_lines
from praxis_lite.trainer.metrics.progress import count_of, metric_text
from praxis_tools.report.curves import progress_axes, weight_unit
from praxis_tools.report.document import SPENT, config_differences
from praxis_tools.report.job_reader import JobState
from praxis_tools.report.step_certificates import failed, summary

_MAX_DIFFERENCES = 40
_MAX_CHANGES = 20


def report_text(jobs: Sequence[JobState]) -> str:
    """Formats tables of jobs, evaluations, differing settings and times, followed by events."""
    parts = [
        _jobs(jobs),
        _evaluations(jobs),
        _differences(jobs),
        _times(jobs),
        _events(jobs),
        *(changes_text(job) for job in jobs),
        *(_certificates(job) for job in jobs),
        "\n".join(f"note: {job.name}: {note}" for job in jobs for note in job.notes),
    ]
    return printable("\n\n".join(part for part in parts if part))


def progress_text(job: JobState) -> str:
    """Formats a line with the step, loss and state of a job."""
    total = f" of {job.num_train_steps}" if job.num_train_steps else ""
    loss = job.columns.get("loss", np.empty(0))
    end = f", loss {metric_text(loss[-1])}" if len(loss) else ""
    return printable(f"{job.name}: step {job.last_step}{total}{end}, {job.state}")


def _jobs(jobs: Sequence[JobState]) -> str:
    rows = [["job", "step", "of", "loss", "weight", "hours", "goodput", "state"]]
    for job in jobs:
        axes, unit = progress_axes(job.columns), weight_unit(job.columns)
        loss = job.columns.get("loss", np.empty(0))
        rows.append(
            [
                job.name,
                str(job.last_step),
                str(job.num_train_steps or ""),
                metric_text(loss[-1]) if len(loss) else "",
                f"{count_of(axes[unit][-1])} {unit}" if unit and len(axes.get(unit, ())) else "",
                f"{axes['hours'][-1]:.3g}" if len(axes.get("hours", ())) else "",
                f"{job.goodput.share:.1%}" if job.goodput else "",
                job.state,
            ]
        )
    return "\n".join(table_lines(rows, right=range(1, 7)))


def _evaluations(jobs: Sequence[JobState]) -> str:
    names = dict.fromkeys(
        (dataset, metric)
        for job in jobs
        for dataset, columns in job.evaluations.items()
        for metric in columns
        if metric != "step"
    )
    if not names:
        return ""
    rows = [["last evaluation", *(job.name for job in jobs)]]
    for dataset, metric in names:
        columns_by_job = [job.evaluations.get(dataset, {}) for job in jobs]
        cells = [
            f"{metric_text(columns[metric][-1])} (step {columns['step'][-1]})"
            if metric in columns
            else ""
            for columns in columns_by_job
        ]
        rows.append([f"{dataset}/{metric}", *cells])
    return "\n".join(table_lines(rows))


def _differences(jobs: Sequence[JobState]) -> str:
    rows, num_equal = config_differences([job.config for job in jobs])
    if len(jobs) < 2:
        return ""
    if not rows:
        return f"All {num_equal} settings are equal."
    cells = [
        [path, *("" if value is None else shortened(value, 40) for value in values)]
        for path, values in rows[:_MAX_DIFFERENCES]
    ]
    lines = table_lines([["settings that differ", *(job.name for job in jobs)], *cells])
    more = len(rows) - _MAX_DIFFERENCES
    if more > 0:
        lines.append(f"and {more} more, shown by --html=FILE")
    return "\n".join([*lines, f"{num_equal} settings are equal"])


def _times(jobs: Sequence[JobState]) -> str:
    names = [name for name in ("step_time", *SPENT) if any(name in job.columns for job in jobs)]
    if not names:
        return ""
    header = ["mean seconds per step", *(name.removesuffix("_time") for name in names)]
    rows = []
    for job in jobs:
        columns = [job.columns.get(name, np.empty(0)) for name in names]
        finite = [column[np.isfinite(column)] for column in columns]
        with np.errstate(over="ignore"):
            means = [f"{values.mean():.3g}" if len(values) else "" for values in finite]
        rows.append([job.name, *means])
    return "\n".join(table_lines([header, *rows], right=range(1, len(header))))


def _events(jobs: Sequence[JobState]) -> str:
    lines = []
    for job in jobs:
        for label, column in (
            ("skipped", "num_skipped_in_a_row"),
            ("loss spikes", "is_loss_spike"),
        ):
            steps = [f"{step:.0f}" for step in job.steps_where(column)]
            if steps:
                lines.append(f"{job.name}: {len(steps)} {label}, at steps {first_few(steps, 8)}")
        if job.goodput and len(job.goodput.launches) > 1:
            lines.append(f"{job.name}: {len(job.goodput.launches)} launches")
    return "\n".join(lines)


def changes_text(job: JobState) -> str:
    """Formats a table of the newest generations of an elastic job; "" for other jobs."""
    changes = job.changes
    if not changes:
        return ""
    num_without_step = sum(not change.reached for change in changes)
    unreached = f", and {num_without_step} without a completed step" if num_without_step else ""
    num_devices = [str(change.num_devices) for change in changes if change.num_devices]
    history = [number for number, _ in itertools.groupby(num_devices)]
    left_out = ["..."] * (len(history) > _MAX_CHANGES)
    rows = [["generation", "from step", "lost", "devices", "seconds", "of which", ""]]
    for change in changes[-_MAX_CHANGES:]:
        longest = sorted(change.seconds.items(), key=lambda item: -item[1])[:3]
        rows.append(
            [
                str(change.generation),
                "" if change.from_step is None else str(change.from_step),
                str(change.lost_steps or 0),
                str(change.num_devices or ""),
                f"{change.total:.1f}",
                ", ".join(f"{part} {value:.1f}" for part, value in longest if value >= 0.05),
                shortened(f"{change.kind}: {change.why}", 100)
                + " (no step completed)" * (not change.reached),
            ]
        )
    return "\n".join(
        [
            f"{job.name}: regroupings: {len(job.regroupings)}{unreached}; devices: "
            f"{' -> '.join([*left_out, *history[-_MAX_CHANGES:]]) or 'unknown'}",
            *table_lines(rows, right=range(5)),
        ]
    )


def _certificates(job: JobState) -> str:
    if not job.certificates:
        return ""
    lines = [f"{job.name}: {summary(job.certificates)}"]
    lines += [
        f"{job.name}: step {item.step} is NOT CERTIFIED: {item.difference}"
        for item in failed(job.certificates)[-_MAX_CHANGES:]
    ]
    return "\n".join(lines)
