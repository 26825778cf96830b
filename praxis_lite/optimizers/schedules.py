"""Pax's learning rate schedules.

Each function here returns a schedule: a function of a count (int, NumPy integer or traced int32)
that returns a float32 scalar. A Learner's `learning_rate` may be such a schedule, or any schedule
from optax:

    learning_rate=fdl.Config(linear_rampup_cosine_decay,
                             warmup_steps=500, decay_start=501, decay_end=20_000, max=3e-4)

The names are Pax's, in snake case. Pax's rate is `learning_rate * schedule(step)`, which is
`scaled(learning_rate, schedule)` here. A cosine with restarts is `optax.sgdr_schedule`.

If two steps are equal (`decay_start == decay_end`), the rate jumps at that step.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.errors import ConfigError, require, require_choice

__all__ = [
    "Schedule",
    "constant",
    "continuous_schedule",
    "cosine",
    "cycle_schedule",
    "delayed_cosine",
    "exponential",
    "linear",
    "linear_rampup_cosine_decay",
    "linear_rampup_exponential_decay",
    "linear_rampup_piecewise_constant",
    "linear_rampup_polynomial_decay",
    "linear_rampup_sqrt_decay",
    "piecewise_constant",
    "piecewise_schedule",
    "polynomial",
    "scaled",
    "sqrt_decay",
    "transformer",
    "warmup_stable_decay",
]

Count = int | jax.Array
# A function from the number of updates to the rate, a float32 scalar.
Schedule = Callable[[Count], jax.Array]
Point = tuple[float, float]  # (step, value)


def scaled(learning_rate: float, schedule: Schedule) -> Schedule:
    """Returns `learning_rate * schedule(count)`, like Pax's `lr` and `lr_schedule`."""
    return lambda count: jnp.float32(learning_rate) * jnp.asarray(schedule(count), jnp.float32)


def constant(value: float = 1.0) -> Schedule:
    """Returns a schedule with the constant `value`."""
    return lambda count: jnp.float32(value)


def polynomial(
    *, start: Point = (0, 1.0), limit: Point = (1, 1.0), power: float = 1, origin: str = "start"
) -> Schedule:
    """Returns a polynomial schedule: y0 until step x0, y1 from step x1, a polynomial in between.

    Args:
      start: (x0, y0), the first step of the polynomial and the value at that step.
      limit: (x1, y1), the last step of the polynomial and the value at that step.
      power: Exponent of the polynomial.
      origin: "start" to interpolate with r ** power, or "limit" to interpolate with
        1 - (1 - r) ** power, where r is the fraction of the steps from x0 to x1.

    Raises:
      ConfigError: The steps are not in ascending order, or a setting is out of range.
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
    """Returns a linear schedule: y0 until step x0, y1 from step x1, a line in between."""
    _points("linear", start, limit)
    return polynomial(start=start, limit=limit)


def exponential(*, start: Point = (0, 1.0), limit: Point = (1, 0.5)) -> Schedule:
    """Returns an exponential schedule: y0 until step x0, y1 from step x1.

    In between, the value is y0 (y1 / y0) ** r, where r is the fraction of the steps from x0 to x1.

    Raises:
      ConfigError: The steps are not in ascending order, or a value is not positive.
    """
    (x0, y0), (x1, y1) = _points("exponential", start, limit)
    for x, y in ((x0, y0), (x1, y1)):
        setting = f"exponential: the value at step {x}"
        require(y > 0, setting, y, "a positive number", "To reach 0, use a different schedule.")
    logarithm = linear(start=(x0, math.log(y0)), limit=(x1, math.log(y1)))
    return lambda count: jnp.exp(logarithm(count))


def cosine(*, initial_value: float = 1.0, final_value: float = 0.0, total_steps: int) -> Schedule:
    """Returns a half-cosine schedule from initial_value at step 0 to final_value at total_steps."""
    return delayed_cosine(start=(0, initial_value), limit=(total_steps, final_value))


def delayed_cosine(*, start: Point = (0, 1.0), limit: Point = (1, 0.5)) -> Schedule:
    """Returns a half-cosine schedule: y0 until step x0, y1 from step x1.

    Raises:
      ConfigError: The steps are not in ascending order.
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
    """Returns a schedule that is constant until start_step, then halves every half_life_steps.

    Args:
      initial_value: The rate until start_step.
      start_step: First step of the decay.
      half_life_steps: Number of steps in which the rate halves.
      min: Minimum rate, as a fraction of initial_value.
    """
    require_positive("continuous_schedule", half_life_steps=half_life_steps)
    expected = "a fraction of initial_value, 0 < min < 1"
    require(0 < min < 1, "continuous_schedule: min", min, expected)
    end = start_step + half_life_steps * math.log2(1 / min)
    return scaled(initial_value, exponential(start=(start_step, 1.0), limit=(end, min)))


def as_float(count: Count) -> jax.Array:
    """Returns a count of any integer type as float32."""
    return jnp.asarray(count, jnp.float32)


def progress(count: Count, x0: float, x1: float) -> jax.Array:
    """Returns the fraction, in [0, 1], of the steps from x0 to x1; jumps to 1 if x0 equals x1."""
    # Subtract as integers if possible: float32 has no odd integers above 2**24.
    since = as_float(jnp.asarray(count) - x0) if isinstance(x0, int) else as_float(count) - x0
    if x0 == x1:
        return jnp.where(since < 0, 0.0, 1.0).astype(jnp.float32)
    return jnp.clip(since / (x1 - x0), 0.0, 1.0)


def _points(name: str, start: Any, limit: Any) -> tuple[Point, Point]:
    for setting, point in (("start", start), ("limit", limit)):
        require(len(point) == 2, f"{name}: {setting}", point, "a pair (step, value)")
    if start[0] > limit[0]:
        raise ConfigError(
            f"{name}: the start is at step {start[0]}, but the limit is at the earlier step "
            f"{limit[0]}. Swap start and limit."
        )
    return tuple(start), tuple(limit)


def require_positive(name: str, **settings: float) -> None:
    """Raises ConfigError if a setting in the schedule `name` is not positive."""
    for setting, value in settings.items():
        require(value > 0, f"{name}: {setting}", value, "a positive number")


def piecewise_schedule(*, boundaries: Sequence[int], schedules: Sequence[Schedule]) -> Schedule:
    """Joins schedules in sequence; each schedule counts its steps from 0.

    This is `optax.join_schedules` with checks.

    Args:
      boundaries: First step of each schedule, except for the first schedule.
      schedules: The schedules; one more than the number of boundaries.

    Raises:
      ConfigError: Boundaries are not in ascending order, or their number is not one less than the
        number of schedules.
    """
    check_pieces("piecewise_schedule", boundaries, "schedules", schedules, len(boundaries) + 1)
    joined = optax.join_schedules(schedules, boundaries)
    return lambda count: jnp.asarray(joined(count), jnp.float32)


def piecewise_constant(*, boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
    """Returns a step function with values[i] from step boundaries[i - 1]."""
    check_pieces("piecewise_constant", boundaries, "values", values, len(boundaries) + 1)
    return piecewise_schedule(boundaries=boundaries, schedules=[constant(v) for v in values])


def cycle_schedule(*, schedules: Sequence[Schedule], steps: Sequence[int]) -> Schedule:
    """Repeats schedules in a cycle, where schedules[i] applies for steps[i] steps.

    All schedules count steps from the start of training, not from the start of the cycle.
    """
    name = "cycle_schedule"
    expected = f"one number per schedule ({len(schedules)}), for at least one schedule"
    require(len(schedules) == len(steps) > 0, f"{name}: steps", steps, expected)
    require_positive(name, **{f"steps[{i}]": n for i, n in enumerate(steps)})
    ends = [sum(steps[: i + 1]) for i in range(len(steps))]

    def schedule(count: Count) -> jax.Array:
        step_in_cycle = jnp.asarray(count) % ends[-1]
        rate = jnp.asarray(schedules[-1](count), jnp.float32)
        # From the last piece to the first, so that the first piece that has not ended applies.
        for end, piece in zip(ends[-2::-1], schedules[-2::-1], strict=True):
            rate = jnp.where(step_in_cycle < end, piece(count), rate)
        return rate

    return schedule


def check_pieces(
    name: str, boundaries: Sequence[int], what: str, pieces: Sequence[Any], count: int
) -> None:
    """Raises ConfigError if boundaries are not ascending, or there are not `count` pieces."""
    number, boundaries = f"{name}: the number of {what}", list(boundaries)
    require(len(pieces) == count, number, len(pieces), f"{count}, for boundaries {boundaries}")
    is_ordered = boundaries == sorted(boundaries) and all(b >= 0 for b in boundaries)
    require(is_ordered, f"{name}: boundaries", boundaries, "steps in ascending order")


def linear_rampup_polynomial_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int = 0,
    decay_end: int,
    max: float,
    min_ratio: float = 0.01,
    power: float = 1,
) -> Schedule:
    """Returns a schedule with linear warmup, a constant phase and polynomial decay.

    Args:
      warmup_steps: First step with the rate `max`.
      decay_start: Last step with the rate `max`.
      decay_end: First step with the final rate `max * min_ratio`.
      max: Maximum rate.
      min_ratio: Final rate, as a fraction of `max`.
      power: Exponent of the decay. After a fraction r of the decay, the rate is
        `max - (1 - min_ratio) max r ** power`.

    Raises:
      ConfigError: The steps are not in ascending order, or a setting is out of range.
    """
    name, steps = "linear_rampup_polynomial_decay", (warmup_steps, decay_start, decay_end)
    decay = functools.partial(polynomial, power=power)
    return _warmup_and_decay(name, decay, *steps, max, min_ratio)


def linear_rampup_cosine_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int = 0,
    decay_end: int,
    max: float,
    min_ratio: float = 0.01,
) -> Schedule:
    """Returns a schedule like `linear_rampup_polynomial_decay`, but with half-cosine decay."""
    name, steps = "linear_rampup_cosine_decay", (warmup_steps, decay_start, decay_end)
    return _warmup_and_decay(name, delayed_cosine, *steps, max, min_ratio)


def linear_rampup_exponential_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int = 0,
    decay_end: int,
    max: float,
    min_ratio: float = 0.01,
) -> Schedule:
    """Returns a schedule like `linear_rampup_polynomial_decay`, but with exponential decay.

    `min_ratio` must be positive.
    """
    name, steps = "linear_rampup_exponential_decay", (warmup_steps, decay_start, decay_end)
    return _warmup_and_decay(name, exponential, *steps, max, min_ratio)


def warmup_stable_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int,
    decay_end: int,
    max: float,
    min_ratio: float = 0.0,
    shape: str = "1-sqrt",
) -> Schedule:
    """Returns a warmup-stable-decay schedule: linear warmup, a long constant phase, a short decay.

    See Hu et al. 2024 (arXiv:2404.06395), and Hägele et al. 2024 (arXiv:2405.18392) for "1-sqrt".

    Args:
      warmup_steps: See `linear_rampup_polynomial_decay`.
      decay_start: See `linear_rampup_polynomial_decay`.
      decay_end: See `linear_rampup_polynomial_decay`.
      max: See `linear_rampup_polynomial_decay`.
      min_ratio: See `linear_rampup_polynomial_decay`.
      shape: Shape of the decay as a function of the fraction r of its steps: "linear" for 1 - r,
        "1-sqrt" for 1 - sqrt(r), or "cosine" for (1 + cos(pi r)) / 2.
    """
    decays: dict[str, Callable[..., optax.Schedule]] = {
        "linear": polynomial,
        "1-sqrt": functools.partial(polynomial, power=0.5),
        "cosine": delayed_cosine,
    }
    require_choice("warmup_stable_decay: shape", shape, decays)
    steps = warmup_steps, decay_start, decay_end
    return _warmup_and_decay("warmup_stable_decay", decays[shape], *steps, max, min_ratio)


def sqrt_decay(
    *, decay_start: int = 10_000, multiplier: float = 1.0, offset: float = 0.0
) -> Schedule:
    """Returns the schedule `multiplier / sqrt(max(count - offset, decay_start))`."""
    require_positive("sqrt_decay", decay_start=decay_start)
    return lambda count: multiplier / jnp.sqrt(jnp.maximum(as_float(count) - offset, decay_start))


def linear_rampup_sqrt_decay(*, peak: float = 1.0, warmup_steps: int = 4000) -> Schedule:
    """Returns a schedule with linear warmup to `peak`, then inverse square root decay.

    After warmup, the rate is `peak * sqrt(warmup_steps / count)`. Step 0 has the same rate as step
    1.
    """
    require_positive("linear_rampup_sqrt_decay", warmup_steps=warmup_steps)

    def schedule(count: Count) -> jax.Array:
        x = jnp.maximum(as_float(count), 1)
        return peak * jnp.minimum(x / warmup_steps, jnp.sqrt(warmup_steps / x))

    return schedule


def transformer(
    *,
    warmup_steps: int = 4000,
    model_dim: int = 512,
    worker_replicas: int = 1,
    decay_end: int | None = None,
) -> Schedule:
    """Returns the schedule from Vaswani et al. 2017: linear warmup, then 1 / sqrt(model_dim * n).

    n is the step count plus one.

    Args:
      warmup_steps: Number of warmup steps per replica.
      model_dim: Model dim; rates are divided by its square root.
      worker_replicas: Factor for the number of warmup steps.
      decay_end: Step after which the rate is constant. If None, the decay never ends.
    """
    require_positive("transformer", warmup_steps=warmup_steps, worker_replicas=worker_replicas)
    require_positive("transformer", model_dim=model_dim)
    warmup = warmup_steps * worker_replicas

    def schedule(count: Count) -> jax.Array:
        n = as_float(count) + 1
        if decay_end is not None:
            n = jnp.minimum(n, decay_end + 1)
        return model_dim**-0.5 * jnp.minimum(n * warmup**-1.5, n**-0.5)

    return schedule


def linear_rampup_piecewise_constant(
    *, boundaries: Sequence[int], values: Sequence[float]
) -> Schedule:
    """Returns a schedule with linear warmup to values[0], and values[i] from boundaries[i].

    Raises:
      ConfigError: Boundaries are not in ascending order, or the numbers of boundaries and values
        differ.
    """
    name = "linear_rampup_piecewise_constant"
    require(len(boundaries) > 0, f"{name}: boundaries", boundaries, "one step per value")
    check_pieces(name, boundaries, "values", values, len(boundaries))
    steps = piecewise_constant(boundaries=boundaries[1:], values=values)
    return _with_warmup(boundaries[0], values[0], steps)


def _with_warmup(warmup_steps: int, peak: float, schedule: Schedule) -> Schedule:
    warmup = linear(start=(0, 0.0), limit=(warmup_steps, peak))
    return lambda count: jnp.where(as_float(count) < warmup_steps, warmup(count), schedule(count))


def _warmup_and_decay(
    name: str,
    decay: Callable[..., Schedule],
    warmup_steps: int,
    decay_start: int,
    decay_end: int,
    peak: float,
    min_ratio: float,
) -> Schedule:
    """Checks settings, and returns a schedule with linear warmup, a constant phase and `decay`."""
    steps = {"warmup_steps": warmup_steps, "decay_start": decay_start, "decay_end": decay_end}
    require(
        0 <= warmup_steps <= decay_start <= decay_end,
        f"{name}: {', '.join(steps)}",
        tuple(steps.values()),
        "0 <= warmup_steps <= decay_start <= decay_end",
        "All three are counted from step 0.",
    )
    require_positive(name, max=peak)
    expected = "a fraction of max, from 0 to 1"
    require(0 <= min_ratio <= 1, f"{name}: min_ratio", min_ratio, expected)
    decay_schedule = decay(start=(decay_start, peak), limit=(decay_end, peak * min_ratio))
    return _with_warmup(warmup_steps, peak, decay_schedule)
