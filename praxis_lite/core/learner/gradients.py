"""Gradient norms, gradient clipping, and the norm from which on a step is skipped."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, is_number, require

PyTree = Any


@dataclasses.dataclass(frozen=True)
class GradientLimits:
    """How large gradients may be; 0: no limit. The names and rules of Pax's learner.

    Attributes:
      clip_gradient_norm_to_value: the largest norm of all gradients together.
      clip_gradient_single_norm_to_value: the largest norm of each weight's gradient, of each layer
        in a stack.
      clip_gradient_to_value: the largest magnitude of an element of a gradient.
      skip_step_gradient_norm_value: a step whose norm before clipping is this or more is skipped.
      owner: the class that has these settings, for errors.

    Raises:
      ConfigError: a limit is negative or not a number, or two kinds of clipping are set.
    """

    clip_gradient_norm_to_value: float = 0.0
    clip_gradient_single_norm_to_value: float = 0.0
    clip_gradient_to_value: float = 0.0
    skip_step_gradient_norm_value: float = 0.0
    owner: str = "Learner"

    def __post_init__(self):
        limits = dataclasses.asdict(self)
        del limits["owner"]
        for name, limit in limits.items():
            require(
                is_number(limit) and limit >= 0, f"{self.owner}.{name}", limit,
                "a positive number, or 0 for no limit",
            )
        clips = [name for name, limit in limits.items() if limit and name.startswith("clip")]
        if len(clips) > 1:
            raise ConfigError(
                f"{self.owner}.{clips[0]} and {clips[1]} are both set. Set one of them to 0."
            )

    def keeps(self, grad_norm: jax.Array) -> jax.Array:
        """Returns True if a step with this finite norm is not skipped."""
        limit = self.skip_step_gradient_norm_value
        return grad_norm < limit if limit else jnp.ones((), bool)

    def clipped(self, grads: PyTree, grad_norm: jax.Array) -> PyTree:
        """Returns a layer's gradients within the limits.

        Args:
          grads: arrays of any dtype.
          grad_norm: of all gradients together, not of these alone.
        """
        if self.clip_gradient_norm_to_value:
            return _scaled(grads, grad_norm, self.clip_gradient_norm_to_value)
        if self.clip_gradient_single_norm_to_value:
            most = self.clip_gradient_single_norm_to_value
            return jax.tree.map(lambda g: _scaled(g, global_norm(g), most), grads)
        if self.clip_gradient_to_value:
            most = self.clip_gradient_to_value
            return jax.tree.map(lambda g: jnp.clip(g, -most, most), grads)
        return grads


def limits_by_optimizer(
    main: GradientLimits, auxiliary: Sequence[Any], apply_separate_scaling: bool
) -> dict[str, GradientLimits]:
    """Returns the limits of each optimizer by name, "" for the main optimizer: `main`, or its own.

    Args:
      auxiliary: AuxiliaryOptimizers.

    Raises:
      ConfigError: a limit of an auxiliary optimizer is wrong or would be ignored, or gradients are
        to be scaled separately without auxiliary optimizers.
    """
    if apply_separate_scaling and not auxiliary:
        raise ConfigError(
            "Learner.apply_separate_scaling clips each optimizer's gradients by their own norm, "
            "but there are no auxiliary_optimizers. Leave it out."
        )
    limits = {"": main}
    for aux in auxiliary:
        limit = GradientLimits(
            aux.clip_gradient_norm_to_value, aux.clip_gradient_single_norm_to_value,
            owner=f"AuxiliaryOptimizer '{aux.name}'",
        )  # fmt: skip
        is_limited = limit.clip_gradient_norm_to_value or limit.clip_gradient_single_norm_to_value
        if is_limited and not apply_separate_scaling:
            raise ConfigError(
                f"{limit.owner} sets a clip_gradient_... of its own, but "
                "Learner.apply_separate_scaling is False, so that all gradients would be clipped "
                "together by the Learner's. Set apply_separate_scaling=True, or remove it."
            )
        limits[aux.name] = limit if apply_separate_scaling else main
    return limits


def global_norm(grads: PyTree) -> jax.Array:
    """Returns the float32 norm of all gradients together; 0 if there are no gradients."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _scaled(grads: PyTree, norm: jax.Array, most: float) -> PyTree:
    factor = jnp.minimum(1.0, most / norm)  # A norm of 0: the quotient is inf, the factor 1.
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
