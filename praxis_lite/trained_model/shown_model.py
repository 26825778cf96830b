"""Formats a trained model's loss curve and last metrics for notebooks and `repr`."""

import html
from collections.abc import Mapping

import numpy as np

from praxis_lite.trainer.metrics.progress import metric_text
from praxis_lite.trainer.metrics.svg_curve import Columns, legend, loss_svg

__all__ = ("html_of",)

# Names of the metrics in the last step that are shown if they exist.
_SHOWN = ("loss", "learning_rate", "grad_norm", "step_time", "tokens_per_second", "mfu")


def text_of(metrics: Columns, evaluations: Mapping[str, Columns]) -> str:
    """Formats the last losses as ", loss 2.31, heldout loss 2.45", or "" if there are none."""
    numbers = {"": metrics, **evaluations}
    return "".join(
        f", {f'{name} loss'.strip()} {metric_text(float(columns['loss'][-1]))}"
        for name, columns in numbers.items()
        if _has_number(columns, "loss")
    )


def html_of(title: str, place: str, metrics: Columns, evaluations: Mapping[str, Columns]) -> str:
    """Returns an HTML element with a title, the loss curve, and the last metrics of each dataset.

    Args:
      title: The title.
      place: The job directory.
      metrics: Columns of the training metrics, as in `TrainedModel.metrics`.
      evaluations: Columns, keyed by dataset, as in `TrainedModel.evaluations`.
    """
    last = [_last(metrics, _SHOWN)]
    last += [_last(columns, tuple(columns)) for columns in evaluations.values()]
    rows = "".join(
        f'<tr><td style="text-align:left"><span style="color:{color}">&#9679;</span> '
        f'{html.escape(name)}</td><td style="text-align:left">{html.escape(numbers)}</td></tr>'
        for (name, color), numbers in zip(legend(list(evaluations)), last, strict=True)
        if numbers
    )
    return (
        f"<div><b>{html.escape(title)}</b><br><small>{html.escape(place)}</small><br>"
        f"{loss_svg(metrics, evaluations)}<table>{rows}</table></div>"
    )


def _last(columns: Columns, names: tuple[str, ...]) -> str:
    if not len(columns.get("step", ())):
        return ""
    numbers = [
        f"{name} {columns[name][-1]:.4g}"
        for name in names
        if name != "step" and _has_number(columns, name)
    ]
    return f"step {columns['step'][-1]}: {', '.join(numbers)}"


def _has_number(columns: Columns, name: str) -> bool:
    column = columns.get(name, np.zeros(0))
    return bool(len(column)) and not np.isnan(column[-1])
