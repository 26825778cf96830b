"""A rate that goes from a value to another between two steps: as a line, a power, a cosine."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require, require_choice

Count = int | jax.Array
# A function of the number of updates made; returns the rate, a float32 scalar.
Schedule = Callable[[Count], jax.Array]
Point = tuple[float, float]  # (step, value)


def scaled(learning_rate: float, schedule: Schedule) -> Schedule:
    """Returns the schedule `learning_rate * schedule(count)`; Pax's `lr` and `lr_schedule`."""
    return lambda count: jnp.float32(learning_rate) * jnp.asarray(schedule(count), jnp.float32)


def constant(value: float = 1.0) -> Schedule:
    """Returns the schedule that is always `value`."""
    return lambda count: jnp.float32(value)


def polynomial(
    *, start: Point = (0, 1.0), limit: Point = (1, 1.0), power: float = 1, origin: str = "start"
) -> Schedule:
    """Returns y0 until x0, y1 from x1 on, and a polynomial in between.

    Args:
      start: (x0, y0), a step and its value.
      limit: (x1, y1).
      power: of the share r of the way from x0 to x1.
      origin: "start": r ** power of the way up; "limit": 1 - (1 - r) ** power of it.

    Raises:
      ConfigError: the steps are not in order, or a setting is out of range.
    """
    (x0, y0), (x1, y1) = _points("polynomial", start, limit)
    require_positive("polynomial", power=power)
    require_choice("polynomial: origin", origin, ("start", "limit"))

    def schedule(count: Count) -> jax.Array:
        r = progress(count, x0, x1)
        share = r**power if origin == "start" else 1 - (1 - r) ** power
        return y0 + share * (y1 - y0)

    return schedule


def linear(*, start: Point = (0, 1.0), limit: Point = (1, 1.0)) -> Schedule:
    """Returns y0 until x0, y1 from x1 on, and a line in between; see `polynomial`."""
    _points("linear", start, limit)
    return polynomial(start=start, limit=limit)


def exponential(*, start: Point = (0, 1.0), limit: Point = (1, 0.5)) -> Schedule:
    """Returns y0 until x0, y1 from x1 on, and y0 (y1 / y0) ** r at a share r of the way between.

    Raises:
      ConfigError: the steps are not in order, or a value is not positive.
    """
    (x0, y0), (x1, y1) = _points("exponential", start, limit)
    for x, y in ((x0, y0), (x1, y1)):
        setting, mend = f"exponential: the value at step {x}", "To reach 0, take another shape."
        require(y > 0, setting, y, "a positive number", mend)
    logarithm = linear(start=(x0, math.log(y0)), limit=(x1, math.log(y1)))
    return lambda count: jnp.exp(logarithm(count))


def cosine(*, initial_value: float = 1.0, final_value: float = 0.0, total_steps: int) -> Schedule:
    """Returns half a cosine from initial_value at step 0 to final_value at total_steps."""
    return delayed_cosine(start=(0, initial_value), limit=(total_steps, final_value))


def delayed_cosine(*, start: Point = (0, 1.0), limit: Point = (1, 0.5)) -> Schedule:
    """Returns y0 until x0, y1 from x1 on, and half a cosine in between.

    Raises:
      ConfigError: the steps are not in order.
    """
    (x0, y0), (x1, y1) = _points("cosine", start, limit)

    def schedule(count: Count) -> jax.Array:
        return y1 + 0.5 * (y0 - y1) * (1 + jnp.cos(math.pi * progress(count, x0, x1)))

    return schedule


def continuous_schedule(
    *,
    initial_value: float = 1.0,
    start_step: int = 400_000,
    half_life_steps: int = 100_000,
    min: float = 0.01,
) -> Schedule:
    """Returns initial_value until start_step, halved every half_life_steps from then on.

    Args:
      min: the least share of initial_value.
    """
    require_positive("continuous_schedule", half_life_steps=half_life_steps)
    expected = "a share of initial_value, 0 < min < 1"
    require(0 < min < 1, "continuous_schedule: min", min, expected)
    end = start_step + half_life_steps * math.log2(1 / min)
    return scaled(initial_value, exponential(start=(start_step, 1.0), limit=(end, min)))


def as_float(count: Count) -> jax.Array:
    """Returns a count of any integer type as float32."""
    return jnp.asarray(count, jnp.float32)


def progress(count: Count, x0: float, x1: float) -> jax.Array:
    """Returns the share of the way from x0 to x1, from 0 to 1; a jump where they are the same."""
    # Integers first: float32 has no odd counts above 2**24.
    since = as_float(jnp.asarray(count) - x0) if isinstance(x0, int) else as_float(count) - x0
    if x0 == x1:
        return jnp.where(since < 0, 0.0, 1.0).astype(jnp.float32)
    return jnp.clip(since / (x1 - x0), 0.0, 1.0)


def _points(name: str, start: Any, limit: Any) -> tuple[Point, Point]:
    for setting, point in (("start", start), ("limit", limit)):
        require(len(point) == 2, f"{name}: {setting}", point, "a pair (step, value)")
    if start[0] > limit[0]:
        raise ConfigError(
            f"{name}: it starts at step {start[0]} and ends at step {limit[0]}, before. Exchange "
            "them."
        )
    return tuple(start), tuple(limit)


def require_positive(name: str, **settings: float) -> None:
    """Checks the settings of the schedule `name`; raises a ConfigError that names the setting."""
    for setting, value in settings.items():
        require(value > 0, f"{name}: {setting}", value, "a positive number")
