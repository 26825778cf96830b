"""Rates that rise to a peak and decay from it."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import require, require_choice
from praxis_lite.schedules.pieces import check_pieces, piecewise_constant
from praxis_lite.schedules.shapes import (
    Count,
    Schedule,
    as_float,
    delayed_cosine,
    exponential,
    linear,
    polynomial,
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
