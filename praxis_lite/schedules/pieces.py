"""Schedules in sequence, once or over and over."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.errors import require
from praxis_lite.schedules.shapes import Count, Schedule, constant, require_positive


def piecewise_schedule(*, boundaries: Sequence[int], schedules: Sequence[Schedule]) -> Schedule:
    """Returns schedules in sequence, each counting from its own first step.

    `optax.join_schedules`, checked.

    Args:
      boundaries: the first step of each schedule but the first.

    Raises:
      ConfigError: boundaries are not in order, or not one fewer than schedules.
    """
    check_pieces("piecewise_schedule", boundaries, "schedules", schedules, len(boundaries) + 1)
    joined = optax.join_schedules(schedules, boundaries)
    return lambda count: jnp.asarray(joined(count), jnp.float32)


def piecewise_constant(*, boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
    """Returns values[i] from step boundaries[i - 1] on; a boundary fewer than values."""
    check_pieces("piecewise_constant", boundaries, "values", values, len(boundaries) + 1)
    return piecewise_schedule(boundaries=boundaries, schedules=[constant(v) for v in values])


def cycle_schedule(*, schedules: Sequence[Schedule], steps: Sequence[int]) -> Schedule:
    """Returns schedules[i] for steps[i] steps, over and over; each is given the absolute count."""
    name = "cycle_schedule"
    expected = f"as many as schedules ({len(schedules)}), and at least one of each"
    require(len(schedules) == len(steps) > 0, f"{name}: steps", steps, expected)
    require_positive(name, **{f"steps[{i}]": n for i, n in enumerate(steps)})
    ends = [sum(steps[: i + 1]) for i in range(len(steps))]

    def schedule(count: Count) -> jax.Array:
        place = jnp.asarray(count) % ends[-1]
        rate = jnp.asarray(schedules[-1](count), jnp.float32)
        for end, piece in zip(ends[-2::-1], schedules[-2::-1], strict=True):
            rate = jnp.where(place < end, piece(count), rate)
        return rate

    return schedule


def check_pieces(
    name: str, boundaries: Sequence[int], what: str, pieces: Sequence[Any], wanted: int
) -> None:
    """Raises a ConfigError if boundaries are not in order, or the pieces not as many as wanted."""
    number, boundaries = f"{name}: the number of {what}", list(boundaries)
    require(len(pieces) == wanted, number, len(pieces), f"{wanted}, for boundaries {boundaries}")
    is_ordered = boundaries == sorted(boundaries) and all(b >= 0 for b in boundaries)
    require(is_ordered, f"{name}: boundaries", boundaries, "steps in ascending order")
