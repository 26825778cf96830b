"""Draws a run's loss curve as a PNG, from the run's JSON lines."""

from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.atomic_files import write_picture
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.columns import Columns, columns_by_dataset, columns_of
from praxis_lite.trainer.metrics.json_lines import evaluation_lines, sampled_lines

_TRAIN_COLOR = "#1f5fa8"
_EVAL_COLORS = ("#d1495b", "#2e8b57", "#8e5ea2", "#e08e0b")
_GRAY = "#5f6368"


def plot_loss_curve(job: JobDir, title: str) -> None:
    """Writes a job's loss_curve.png: raw and smoothed training losses, and evaluations as points.

    A panel below shows the learning rate if it was recorded. If metrics.jsonl is larger than 4 MiB,
    about 8,000 evenly spaced lines are drawn, so that plotting does not slow down as the run gets
    longer.

    Raises:
      ConfigError: No line contains a loss, or the PNG cannot be written. An existing PNG is kept.
    """
    # Without pyplot, the figure uses Agg and does not affect the user's backend and figures.
    figures = optional_module("matplotlib.figure", str(job.loss_curve_png))
    metrics = columns_of(list(sampled_lines(job.metrics_jsonl)))
    if "loss" not in metrics:
        raise ConfigError(f"{job.metrics_jsonl} contains no losses, so the curve cannot be drawn.")
    steps, losses, rates = metrics["step"], metrics["loss"], metrics.get("learning_rate")
    figure = figures.Figure(figsize=(9, 4.6 if rates is None else 5.6), layout="constrained")
    if rates is None:
        loss_axes = rate_axes = figure.subplots()
    else:
        loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        rate_axes.plot(steps, rates, color=_GRAY, linewidth=1.4)
        rate_axes.set_ylabel("learning rate")
        rate_axes.set_ylim(0, np.max(rates, initial=0, where=np.isfinite(rates)) * 1.15 or 1)
        rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)

    loss_axes.plot(steps, losses, color=_TRAIN_COLOR, alpha=0.28, linewidth=0.9)
    smooth_losses = smoothed(losses)
    loss_axes.plot(
        steps,
        smooth_losses,
        color=_TRAIN_COLOR,
        linewidth=2,
        label=f"training, smoothed: {smooth_losses[-1]:.3f}",
    )
    evaluations = columns_by_dataset(evaluation_lines(job.eval_metrics_jsonl))
    for index, (dataset, columns) in enumerate(evaluations.items()):
        if "loss" in columns:
            _draw_evaluations(loss_axes, dataset, columns, _EVAL_COLORS[index % len(_EVAL_COLORS)])

    loss_axes.set_ylabel("loss")
    rate_axes.set_xlabel("step")
    # Names may contain dollar signs, which must not be interpreted as math text.
    loss_axes.set_title(title, loc="left", fontsize=12, fontweight="bold", parse_math=False)
    for text in loss_axes.legend(frameon=False, loc="upper right").get_texts():
        text.set_parse_math(False)
    for axes in {loss_axes, rate_axes}:
        axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.015)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    write_picture(job.loss_curve_png, figure, dpi=130)


def _draw_evaluations(axes: Any, dataset: str, columns: Columns, color: str) -> None:
    label = f"{dataset}: {columns['loss'][-1]:.3f}"
    if "bits_per_byte" in columns:
        label += f" ({columns['bits_per_byte'][-1]:.2f} bits per byte)"
    axes.plot(
        columns["step"],
        columns["loss"],
        color=color,
        linewidth=1,
        linestyle=":",
        marker="o",
        markersize=5,
        markeredgecolor="white",
        label=label,
    )


def smoothed(values: np.ndarray) -> np.ndarray:
    """Smooths values with a centered moving average over 2% of the run on each side.

    Values that are not finite are ignored. The average is centered, because a trailing average lags
    while the loss falls fast. Near the first step, where the loss is steepest and the window is
    truncated, a line is fitted to the window instead. Near the last step, the mean is used, because
    a fitted line would follow the noise in individual steps.
    """
    num_values = len(values)
    is_finite, index = np.isfinite(values), np.arange(num_values)
    half = max(1, round(num_values * 0.02))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, num_values)

    # The sum over each window is a difference of two cumulative sums.
    def sums(terms: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0.0], np.cumsum(np.where(is_finite, terms, 0.0))])
        return total[high] - total[low]

    def means(terms: np.ndarray) -> np.ndarray:
        counts = sums(np.ones(num_values))
        return np.divide(sums(terms), counts, out=np.full(num_values, np.nan), where=counts > 0)

    values = np.where(is_finite, values, 0.0)
    smooth, center = means(values), means(index)
    # The slope of a line that is fitted by least squares is covariance / variance.
    spread = means(index**2) - center**2
    is_start = (index < half) & (spread > 0)
    slope = np.divide(
        means(index * values) - center * smooth, spread, out=np.zeros(num_values), where=is_start
    )
    return smooth + slope * np.where(is_start, index - center, 0.0)
