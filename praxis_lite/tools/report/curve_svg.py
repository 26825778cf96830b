"""A metric of jobs over their steps as an SVG picture, for pages and notebooks."""

import html
from collections.abc import Sequence

import numpy as np

from praxis_lite.run.trainer.metrics.progress import count_of
from praxis_lite.tools.report.buckets import buckets_of
from praxis_lite.tools.report.job_reader import JobState

# Colours that differ in lightness too; the page's script has the same.
COLOURS = (
    "#2f6fde", "#d1495b", "#2e8b57", "#b07000", "#8e5ea2", "#0b8a94", "#b5409b", "#6b6f2a",
)
_MOST_POINTS = 6_000  # Of all curves.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 300, 56, 28, 12


def curve_svg(jobs: Sequence[JobState], metric: str = "loss") -> str:
    """Returns an `<svg>` element: each job's metric against steps, and its last value.

    Of long jobs the means of neighbouring steps are drawn. A job without finite values is in the
    legend only. Names are escaped.
    """
    most = min(_WIDTH, max(_MOST_POINTS // max(len(jobs), 1), 20))
    curves = [(job.name, *_curve(job, metric, most)) for job in jobs]
    steps = np.concatenate([[0.0, 1.0], *(steps for _, steps, _ in curves)])
    values = np.concatenate([np.empty(0), *(values for _, _, values in curves)])
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5

    def x(step: np.ndarray | float) -> np.ndarray | float:
        return _LEFT + step / steps.max() * (_WIDTH - _LEFT - 8)

    def y(value: np.ndarray | float) -> np.ndarray | float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} '
        f'{_HEIGHT + 20 * len(curves)}" role="img" font-family="sans-serif" font-size="12" '
        f'fill="currentColor" style="max-width:{_WIDTH}px">',
        f"<title>{html.escape(metric)} against steps</title>",
    ]
    for value in np.linspace(low, high, 5):
        parts.append(
            f'<path d="M{_LEFT} {y(value):.1f}H{_WIDTH - 8}" stroke="currentColor" opacity=".15"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    for step in np.linspace(0, steps.max(), 5):
        parts.append(
            f'<text x="{x(step):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{count_of(step)}'
            "</text>"
        )
    for index, (name, of_job, values) in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(
            f"{a:.1f},{b:.1f}" for a, b in zip(x(of_job), y(values), strict=True)
        )
        last = f": {metric} {values[-1]:.4f} at step {of_job[-1]:.0f}" if len(values) else ""
        row = _HEIGHT + 20 * index
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<rect x="{_LEFT}" y="{row}" width="14" height="10" fill="{colour}"/>'
            f'<text x="{_LEFT + 20}" y="{row + 10}">{html.escape(name + last)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _curve(job: JobState, metric: str, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most so many steps and finite values of a job's metric."""
    steps, values = job.columns["step"], job.columns.get(metric)
    if values is None:
        return np.empty(0), np.empty(0)
    buckets = buckets_of(len(steps), most)
    steps, values = steps[buckets.ends], buckets.means(values)
    return steps[np.isfinite(values)], values[np.isfinite(values)]
