"""How far a job had come with each line of metrics.jsonl: steps, tokens or examples, hours."""

from collections.abc import Mapping

import numpy as np

_PER_SECOND = "_per_second"
# Beside each other in the loop: all that passes while a job trains, but for its beginning.
_TIMES = ("step_time", "evaluation_time", "save_time")


def weight_unit(columns: Mapping[str, np.ndarray]) -> str | None:
    """Returns the unit of a batch's weight, such as "tokens", or None if no column tells it."""
    units = [name.removesuffix(_PER_SECOND) for name in columns if name.endswith(_PER_SECOND)]
    units = [unit for unit in units if unit not in ("steps", "hours")]  # The other axes.
    usual = [unit for unit in ("tokens", "examples") if unit in units]
    return next(iter([*usual, *units]), None)


def progress_axes(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns "steps", the weight by its unit, and "hours", as they were after each line.

    Lines that were lost count for nothing. Hours are those in which steps, evaluations and saves
    were made; launches and the time between them are not among them.
    """
    axes = {"steps": columns["step"]}
    times = {name: _sound(columns[name]) for name in _TIMES if name in columns}
    unit = weight_unit(columns)
    if unit and "step_time" in times:
        axes[unit] = np.cumsum(_sound(columns[f"{unit}{_PER_SECOND}"]) * times["step_time"]).round()
    if times:
        axes["hours"] = np.cumsum(sum(times.values())) / 3600
    return axes


def _sound(column: np.ndarray) -> np.ndarray:
    """Returns a column with 0 in place of numbers that no clock and no batch has."""
    return np.where((column > 0) & (column < 1e15), column, 0.0)


def at_steps(axes: Mapping[str, np.ndarray], steps: np.ndarray) -> dict[str, np.ndarray]:
    """Returns how far the job had come at steps, such as those of evaluations, between lines too.

    Steps before the first line are at its beginning, and those behind the last at its end.
    """
    known = {name: axis for name, axis in axes.items() if name != "steps"}
    lines = np.searchsorted(axes["steps"], steps, side="right")
    return {
        "steps": steps,
        **{name: np.concatenate([[0.0], axis])[lines] for name, axis in known.items()},
    }
