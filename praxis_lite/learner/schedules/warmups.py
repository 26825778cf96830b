"""Rates that rise to a peak and decay from it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from praxis_lite.errors import did_you_mean
from praxis_lite.learner.schedules.pieces import check_pieces, piecewise_constant
from praxis_lite.learner.schedules.shapes import (
    Count,
    Point,
    Schedule,
    as_float,
    delayed_cosine,
    exponential,
    linear,
    polynomial,
    require,
    require_positive,
)


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
    name = "linear_rampup_polynomial_decay"
    start, limit = _decay(name, warmup_steps, decay_start, decay_end, max, min_ratio)
    return _ramped_up(warmup_steps, max, polynomial(start=start, limit=limit, power=power))


def linear_rampup_cosine_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int = 0,
    decay_end: int,
    max: float,
    min_ratio: float = 0.01,
) -> Schedule:
    """Returns `linear_rampup_polynomial_decay`, but that half a cosine leads down."""
    name = "linear_rampup_cosine_decay"
    start, limit = _decay(name, warmup_steps, decay_start, decay_end, max, min_ratio)
    return _ramped_up(warmup_steps, max, delayed_cosine(start=start, limit=limit))


def linear_rampup_exponential_decay(
    *,
    warmup_steps: int = 0,
    decay_start: int = 0,
    decay_end: int,
    max: float,
    min_ratio: float = 0.01,
) -> Schedule:
    """Returns `linear_rampup_polynomial_decay`, but that an exponential leads down.

    Raises:
      ConfigError: min_ratio is 0, which no exponential reaches; or as there.
    """
    name = "linear_rampup_exponential_decay"
    start, limit = _decay(name, warmup_steps, decay_start, decay_end, max, min_ratio)
    return _ramped_up(warmup_steps, max, exponential(start=start, limit=limit))


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
        "1-sqrt": lambda **points: polynomial(power=0.5, **points),
        "cosine": delayed_cosine,
    }
    require(
        shape in decays,
        f"warmup_stable_decay: shape is {shape!r}; wanted is one of {', '.join(decays)}."
        f"{did_you_mean(str(shape), decays)}",
    )
    name = "warmup_stable_decay"
    start, limit = _decay(name, warmup_steps, decay_start, decay_end, max, min_ratio)
    return _ramped_up(warmup_steps, max, decays[shape](start=start, limit=limit))


def sqrt_decay(
    *, decay_start: int = 10_000, multiplier: float = 1.0, offset: float = 0.0
) -> Schedule:
    """Returns `multiplier / sqrt(max(count - offset, decay_start))`."""
    require(
        decay_start > 0, f"sqrt_decay: decay_start is {decay_start}; wanted is a positive step."
    )
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
    require_positive(
        "transformer",
        warmup_steps=warmup_steps,
        model_dim=model_dim,
        worker_replicas=worker_replicas,
    )
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
    require(len(boundaries) > 0, f"{name}: boundaries is empty; wanted is a step per value.")
    check_pieces(name, boundaries, "values", values, len(boundaries))
    steps = piecewise_constant(boundaries=boundaries[1:], values=values)
    return _ramped_up(boundaries[0], values[0], steps)


def _ramped_up(warmup_steps: int, peak: float, schedule: Schedule) -> Schedule:
    up = linear(start=(0, 0.0), limit=(warmup_steps, peak))
    return lambda count: jnp.where(as_float(count) < warmup_steps, up(count), schedule(count))


def _decay(
    name: str, warmup_steps: int, decay_start: int, decay_end: int, peak: float, min_ratio: float
) -> tuple[Point, Point]:
    """Returns where the decay starts and ends, checked."""
    require(
        0 <= warmup_steps <= decay_start <= decay_end,
        f"{name}: warmup_steps is {warmup_steps}, decay_start {decay_start}, decay_end {decay_end};"
        " wanted is 0 <= warmup_steps <= decay_start <= decay_end. All three count from step 0.",
    )
    require(peak > 0, f"{name}: max is {peak}; wanted is a positive learning rate.")
    require(
        0 <= min_ratio <= 1,
        f"{name}: min_ratio is {min_ratio}; wanted is a share of max, from 0 to 1.",
    )
    return (decay_start, peak), (decay_end, peak * min_ratio)
