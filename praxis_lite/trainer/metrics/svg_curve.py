"""Draws the loss curve as an SVG element for notebooks, without a plotting package."""

import html
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from praxis_lite.trainer.metrics.loss_curve import smoothed
from praxis_lite.trainer.metrics.progress import metric_text

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 28
_COLOR = "#1f77b4"
_EVALUATION_COLORS = ("#d1495b", "#2e8b57", "#8e5ea2", "#e08e0b")
_MAX_LOSS = 1e100  # Squares and differences of smaller losses do not overflow.
_MAX_POINTS = 1_000  # More points than pixels would only make the SVG larger.

Columns = Mapping[str, np.ndarray]


def loss_svg(metrics: Columns, evaluations: Mapping[str, Columns]) -> str:
    """Returns an SVG that plots loss against step, or "" if there is no loss below 1e100.

    Args:
      metrics: Columns "step" and "loss" from training, drawn as a faint raw curve and a smoothed
        curve.
      evaluations: Columns "step" and "loss", keyed by dataset; drawn as points.
    """
    train_steps, train_losses = _points(metrics)
    series = {name: _points(columns) for name, columns in evaluations.items()}
    steps = np.concatenate([train_steps, *(steps for steps, _ in series.values())])
    losses = np.concatenate([train_losses, *(losses for _, losses in series.values())])
    if not losses.size:
        return ""
    to_x = _scale(steps, _LEFT, _WIDTH - _RIGHT)
    to_y = _scale(losses, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_axes(steps, losses, to_x, to_y)]
    if train_losses.size:
        parts.append(_line(to_x(train_steps), to_y(train_losses), 'stroke-opacity="0.3"'))
        parts.append(_line(to_x(train_steps), to_y(smoothed(train_losses)), 'stroke-width="2"'))
    for (name, color), (eval_steps, values) in zip(
        legend(list(series))[1:], series.values(), strict=True
    ):
        title = f"<title>{html.escape(name)}</title>"
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">{title}</circle>'
            for x, y in zip(to_x(eval_steps), to_y(values), strict=True)
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-size="11" role="img" '
        f'aria-label="loss against step">{"".join(parts)}</svg>'
    )


def legend(evaluations: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (name, color) for the training loss and for each evaluation dataset in the SVG."""
    colors = itertools.cycle(_EVALUATION_COLORS)
    return [("training", _COLOR), *zip(evaluations, colors, strict=False)]


def _points(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most _MAX_POINTS evenly spaced steps and losses to draw."""
    steps, losses = columns.get("step", np.zeros(0)), columns.get("loss", np.zeros(0))
    if len(steps) != len(losses):
        return np.zeros(0), np.zeros(0)
    is_drawn = np.abs(losses) < _MAX_LOSS  # False for NaN.
    steps, losses = steps[is_drawn], losses[is_drawn]
    # Includes the first and the last point.
    indices = np.linspace(0, max(0, len(steps) - 1), min(len(steps), _MAX_POINTS)).astype(int)
    return steps[indices].astype(float), losses[indices].astype(float)


def _scale(values: np.ndarray, start: float, end: float):
    low, high = float(values.min()), float(values.max())
    if high == low:
        margin = max(0.5, abs(low) / 2)
        low, high = low - margin, high + margin
    return lambda x: start + (np.asarray(x, float) - low) / (high - low) * (end - start)


def _axes(steps: np.ndarray, losses: np.ndarray, to_x, to_y):
    """Yields the grid lines and labels of both axes."""
    for value in np.linspace(losses.min(), losses.max(), 4):
        y = float(to_y(value))
        yield (
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">'
            f"{metric_text(float(value))}</text>"
        )
    for value in sorted({float(steps.min()), float(steps.max())}):
        yield (
            f'<text x="{float(to_x(value)):.1f}" y="{_HEIGHT - 8}" text-anchor="middle" '
            f'fill="currentColor">{value:,.0f}</text>'
        )


def _line(xs: np.ndarray, ys: np.ndarray, style: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{_COLOR}" {style}/>'
