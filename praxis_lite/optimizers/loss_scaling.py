"""Dynamic loss scaling, which prevents float16 gradients from vanishing or overflowing."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import is_positive_int, require


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that shrinks when gradients overflow, and otherwise grows at regular intervals.

    In each step, the loss is multiplied by the scale, and the float32 gradients are divided by it.
    This preserves values below 6e-8, which float16 would round to zero in the backward pass. If the
    factors are powers of two, scaling is exact for all other values. See Micikevicius et al. 2018
    (arXiv:1710.03740). bfloat16 does not need loss scaling.

    Attributes:
      initial_scale: Scale in the first step.
      growth_interval: Number of consecutive finite steps after which the scale is multiplied by
        growth_factor.
      growth_factor: Factor above 1.
      backoff_factor: Factor between 0 and 1 by which the scale is multiplied after a non-finite
        step.
      min_scale: Minimum scale.
      max_scale: Maximum scale.

    Raises:
      ConfigError: A setting is out of range.
    """

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self):
        lowest, highest = self.min_scale, self.max_scale
        for setting, is_valid, expected in (
            ("growth_interval", is_positive_int(self.growth_interval), "a number of steps"),
            ("growth_factor", 1.0 < self.growth_factor < math.inf, "a number above 1"),
            ("backoff_factor", 0.0 < self.backoff_factor < 1.0, "a number between 0 and 1"),
            ("min_scale", 0.0 < lowest < math.inf, "a number above 0"),
            (
                "max_scale",
                lowest <= highest < math.inf,
                f"a number not below min_scale ({lowest})",
            ),
            (
                "initial_scale",
                lowest <= self.initial_scale <= highest,
                f"a number from min_scale ({lowest}) to max_scale ({highest})",
            ),
        ):
            require(is_valid, f"DynamicLossScale.{setting}", getattr(self, setting), expected)

    def init(self) -> dict[str, jax.Array]:
        """Returns the initial scale, and 0 as the number of finite steps since its last change."""
        return {
            "scale": jnp.asarray(self.initial_scale, jnp.float32),
            "num_good_steps": jnp.zeros((), jnp.int32),
        }

    def update(self, state: dict[str, jax.Array], is_finite: jax.Array) -> dict[str, jax.Array]:
        """Returns the state after a step; `is_finite` is True if loss and gradients are finite."""
        num_good_steps = state["num_good_steps"] + 1
        grows = is_finite & (num_good_steps >= self.growth_interval)
        factor = jnp.where(is_finite, 1.0, self.backoff_factor)
        factor = jnp.where(grows, self.growth_factor, factor)
        return {
            "scale": jnp.clip(state["scale"] * factor, self.min_scale, self.max_scale),
            "num_good_steps": jnp.where(is_finite & ~grows, num_good_steps, 0),
        }
