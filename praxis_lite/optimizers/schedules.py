"""Learning rates as functions of the number of updates made: Pax's schedules under its settings.

Each function here returns a schedule: a function of a count (int, NumPy integer or traced int32)
that returns a float32 scalar. A Learner's `learning_rate` takes it, or any of optax's:

    learning_rate=fdl.Config(linear_rampup_cosine_decay,
                             warmup_steps=500, decay_start=501, decay_end=20_000, max=3e-4)

Names are Pax's in snake case. Pax's rate is `learning_rate * schedule(step)`; so is that of
`scaled(learning_rate, schedule)`. Cosine with restarts is `optax.sgdr_schedule`.

Where two steps are the same (`decay_start == decay_end`), the rate jumps there.
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
        setting = f"exponential: the value at step {x}"
        require(y > 0, setting, y, "a positive number", "To reach 0, take another shape.")
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
    name: str, boundaries: Sequence[int], what: str, pieces: Sequence[Any], count: int
) -> None:
    """Raises a ConfigError if boundaries are not in order, or there are not `count` pieces."""
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
    """Returns a line from 0 to `max`, `max` until decay_start, then a polynomial down.

    Args:
      warmup_steps: the step that is the first at `max`.
      decay_start: the last step at `max`.
      decay_end: the first step at `max * min_ratio`, where the schedule stays.
      power: `max - (1 - min_ratio) max r ** power` at a share r of the decay.

    Raises:
      ConfigError: the steps are not in order, or a setting is out of range.
    """
    name, steps = "linear_rampup_polynomial_decay", (warmup_steps, decay_start, decay_end)
    return _up_and_down(name, functools.partial(polynomial, power=power), *steps, max, min_ratio)


def linear_rampup_cosine_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int = 0,
    decay_end: int,
    max: float,
    min_ratio: float = 0.01,
) -> Schedule:
    """Returns `linear_rampup_polynomial_decay` with half a cosine that leads down."""
    name, steps = "linear_rampup_cosine_decay", (warmup_steps, decay_start, decay_end)
    return _up_and_down(name, delayed_cosine, *steps, max, min_ratio)


def linear_rampup_exponential_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int = 0,
    decay_end: int,
    max: float,
    min_ratio: float = 0.01,
) -> Schedule:
    """Returns `linear_rampup_polynomial_decay` with an exponential that leads down.

    `min_ratio` must be above 0.
    """
    name, steps = "linear_rampup_exponential_decay", (warmup_steps, decay_start, decay_end)
    return _up_and_down(name, exponential, *steps, max, min_ratio)


def warmup_stable_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int,
    decay_end: int,
    max: float,
    min_ratio: float = 0.0,
    shape: str = "1-sqrt",
) -> Schedule:
    """Returns a line up to `max`, `max` for most of the run, and a short decay.

    Hu et al. 2024, arXiv:2404.06395; Hägele et al. 2024, arXiv:2405.18392, for "1-sqrt".

    Args:
      shape: of the decay, at a share r of it: "linear": 1 - r; "1-sqrt": 1 - sqrt(r); "cosine":
        (1 + cos(pi r)) / 2. The rest as in `linear_rampup_polynomial_decay`.
    """
    decays = {
        "linear": polynomial,
        "1-sqrt": functools.partial(polynomial, power=0.5),
        "cosine": delayed_cosine,
    }
    require_choice("warmup_stable_decay: shape", shape, decays)
    steps = warmup_steps, decay_start, decay_end
    return _up_and_down("warmup_stable_decay", decays[shape], *steps, max, min_ratio)


def sqrt_decay(
    *, decay_start: int = 10_000, multiplier: float = 1.0, offset: float = 0.0
) -> Schedule:
    """Returns `multiplier / sqrt(max(count - offset, decay_start))`."""
    require_positive("sqrt_decay", decay_start=decay_start)
    return lambda count: multiplier / jnp.sqrt(jnp.maximum(as_float(count) - offset, decay_start))


def linear_rampup_sqrt_decay(*, peak: float = 1.0, warmup_steps: int = 4000) -> Schedule:
    """Returns a line up to `peak` at warmup_steps, then `peak * sqrt(warmup_steps / count)`.

    Step 0 has the rate of step 1.
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
    """Returns the rate of Vaswani et al. 2017: 1 / sqrt(model_dim * n) after a linear warm-up.

    n is the count plus one; the warm-up lasts `warmup_steps * worker_replicas`.

    Args:
      decay_end: the rate stays as it is at this step; None: it decays for ever.
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
    """Returns a line from 0 to values[0] at boundaries[0]; values[i] from boundaries[i] on.

    Raises:
      ConfigError: boundaries are not in order, or not as many as values.
    """
    name = "linear_rampup_piecewise_constant"
    require(len(boundaries) > 0, f"{name}: boundaries", boundaries, "a step for each value")
    check_pieces(name, boundaries, "values", values, len(boundaries))
    steps = piecewise_constant(boundaries=boundaries[1:], values=values)
    return _ramped_up(boundaries[0], values[0], steps)


def _ramped_up(warmup_steps: int, peak: float, schedule: Schedule) -> Schedule:
    up = linear(start=(0, 0.0), limit=(warmup_steps, peak))
    return lambda count: jnp.where(as_float(count) < warmup_steps, up(count), schedule(count))


def _up_and_down(
    name: str, decay: Callable[..., Schedule], warmup_steps: int, decay_start: int, decay_end: int,
    peak: float, min_ratio: float,
) -> Schedule:
    """Returns `linear_rampup_polynomial_decay` with another decay, its settings checked."""
    steps = {"warmup_steps": warmup_steps, "decay_start": decay_start, "decay_end": decay_end}
    require(
        0 <= warmup_steps <= decay_start <= decay_end, f"{name}: {', '.join(steps)}",
        tuple(steps.values()), "0 <= warmup_steps <= decay_start <= decay_end",
        "All three count from step 0.",
    )
    require_positive(name, max=peak)
    require(0 <= min_ratio <= 1, f"{name}: min_ratio", min_ratio, "a share of max, from 0 to 1")
    down = decay(start=(decay_start, peak), limit=(decay_end, peak * min_ratio))
    return _ramped_up(warmup_steps, peak, down)
