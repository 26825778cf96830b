"""Prepares the curves of a report: computes the x axes and downsamples the curves."""

import dataclasses
from collections.abc import Mapping

import numpy as np

_PER_SECOND = "_per_second"
# These columns measure separate times. Their sum is the training time without startup.
_TIMES = ("step_time", "evaluation_time", "save_time")


def weight_unit(columns: Mapping[str, np.ndarray]) -> str | None:
    """Returns the unit of the batch weight, such as "tokens", or None if there are no weights."""
    units = [name.removesuffix(_PER_SECOND) for name in columns if name.endswith(_PER_SECOND)]
    units = [unit for unit in units if unit not in ("steps", "hours")]  # These are other axes.
    usual = [unit for unit in ("tokens", "examples") if unit in units]
    return next(iter([*usual, *units]), None)


def progress_axes(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the x axes: "steps", the total weight (such as "tokens") and "hours".

    Lost steps are excluded. Hours include the time spent in steps, evaluations and saves, but
    neither startup nor the time between launches.
    """
    axes = {"steps": columns["step"]}
    times = {name: _valid(columns[name]) for name in _TIMES if name in columns}
    unit = weight_unit(columns)
    if unit and "step_time" in times:
        axes[unit] = np.cumsum(_valid(columns[f"{unit}{_PER_SECOND}"]) * times["step_time"]).round()
    if times:
        axes["hours"] = np.cumsum(sum(times.values())) / 3600
    return axes


def _valid(column: np.ndarray) -> np.ndarray:
    """Replaces invalid seconds or weights in a column by 0."""
    return np.where((column > 0) & (column < 1e15), column, 0.0)


def at_steps(axes: Mapping[str, np.ndarray], steps: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the values of all axes at the given steps, such as evaluation steps.

    The values are 0 before the first line and stay constant after the last line.
    """
    known = {name: axis for name, axis in axes.items() if name != "steps"}
    lines = np.searchsorted(axes["steps"], steps, side="right")
    return {
        "steps": steps,
        **{name: np.concatenate([[0.0], axis])[lines] for name, axis in known.items()},
    }


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Consecutive lines in groups, which are smaller at the start, where curves are steep.

    Attributes:
      starts: First line of each bucket, int [buckets].
      num_lines: Total number of lines.
    """

    starts: np.ndarray
    num_lines: int

    @property
    def ends(self) -> np.ndarray:
        """Last line of each bucket, int [buckets]."""
        return np.append(self.starts, self.num_lines)[1:] - 1

    @property
    def are_lines(self) -> bool:
        """Whether each bucket consists of a single line."""
        return len(self.starts) == self.num_lines

    def means(self, values: np.ndarray) -> np.ndarray:
        """Returns the mean of the finite values in each bucket, or NaN if no value is finite."""
        is_finite = np.isfinite(values)
        counts = np.add.reduceat(is_finite, self.starts, dtype=float)
        with np.errstate(over="ignore"):  # The sum may overflow to infinity.
            sums = np.add.reduceat(np.where(is_finite, values, 0.0), self.starts)
        return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)

    def lowest(self, values: np.ndarray) -> np.ndarray:
        """Returns the minimum of each bucket, ignoring NaNs but not -inf."""
        return np.fmin.reduceat(values, self.starts)

    def highest(self, values: np.ndarray) -> np.ndarray:
        """Returns the maximum of each bucket, ignoring NaNs but not inf."""
        return np.fmax.reduceat(values, self.starts)


def buckets_of(num_lines: int, max_buckets: int) -> Buckets:
    """Divides lines into at most `max_buckets` buckets.

    Three quarters of the boundaries are evenly spaced, and the others refine the start. If there
    are at most `max_buckets` lines, each line is a bucket.
    """
    if num_lines <= max_buckets:
        return Buckets(np.arange(num_lines), num_lines)
    at_start = max_buckets // 4
    equal = np.linspace(0, num_lines, max_buckets - at_start, endpoint=False)
    growing = np.geomspace(1, num_lines, at_start, endpoint=False)
    return Buckets(np.unique(np.concatenate([equal, growing]).astype(np.int64)), num_lines)


def with_extremes(values: np.ndarray, max_points: int) -> np.ndarray:
    """Returns at most `max_points` sorted indices, including local extremes and the last value."""
    if len(values) <= max_points:
        return np.arange(len(values))
    bounds = np.linspace(0, len(values), (max_points - 1) // 2 + 1).astype(np.int64)
    kept = {len(values) - 1}
    # Each interval contributes up to two points: its minimum and its maximum.
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        part = values[start:end]
        if not np.isnan(part).all():
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(kept))
