"""Computes gradient norms, clips gradients, and decides whether a gradient is too large."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, is_number, require

PyTree = Any


@dataclasses.dataclass(frozen=True)
class GradientLimits:
    """Limits on the size of gradients, with the names and semantics of Pax's learner.

    A value of 0 disables a limit.

    Attributes:
      clip_gradient_norm_to_value: Maximum global norm of the gradients.
      clip_gradient_single_norm_to_value: Maximum norm of the gradient of each weight. In a stack,
        the limit applies to each layer separately.
      clip_gradient_to_value: Maximum magnitude of each gradient element.
      skip_step_gradient_norm_value: Steps are skipped if the gradient norm before clipping is at
        least this large.
      owner: Name of the class with these settings, for messages.

    Raises:
      ConfigError: A limit is negative or not a number, or two clipping limits are set.
    """

    clip_gradient_norm_to_value: float = 0.0
    clip_gradient_single_norm_to_value: float = 0.0
    clip_gradient_to_value: float = 0.0
    skip_step_gradient_norm_value: float = 0.0
    owner: str = "Learner"

    def __post_init__(self) -> None:
        limits = dataclasses.asdict(self)
        del limits["owner"]
        for name, limit in limits.items():
            require(
                is_number(limit) and limit >= 0,
                f"{self.owner}.{name}",
                limit,
                "a positive number, or 0 for no limit",
            )
        clips = [name for name, limit in limits.items() if limit and name.startswith("clip")]
        if len(clips) > 1:
            raise ConfigError(
                f"{self.owner}.{clips[0]} and {clips[1]} are both set. Set one of them to 0."
            )

    def accepts_step(self, grad_norm: jax.Array) -> jax.Array:
        """Returns a bool scalar: False if a step with this finite gradient norm must be skipped."""
        limit = self.skip_step_gradient_norm_value
        return grad_norm < limit if limit else jnp.ones((), bool)

    def clipped(self, grads: PyTree, grad_norm: jax.Array) -> PyTree:
        """Clips the gradients of one layer.

        Args:
          grads: Arrays of any dtype.
          grad_norm: Global norm of the gradients of all layers.
        """
        if self.clip_gradient_norm_to_value:
            return _clip_norm(grads, grad_norm, self.clip_gradient_norm_to_value)
        if self.clip_gradient_single_norm_to_value:
            max_norm = self.clip_gradient_single_norm_to_value
            return jax.tree.map(lambda g: _clip_norm(g, global_norm(g), max_norm), grads)
        if self.clip_gradient_to_value:
            max_value = self.clip_gradient_to_value
            return jax.tree.map(lambda g: jnp.clip(g, -max_value, max_value), grads)
        return grads


def limits_by_optimizer(
    main: GradientLimits, auxiliary: Sequence[Any], apply_separate_scaling: bool
) -> dict[str, GradientLimits]:
    """Returns the gradient limits, keyed by optimizer name; "" is the main optimizer.

    Args:
      main: Limits for the main optimizer. Without separate scaling, these limits apply to all
        optimizers.
      auxiliary: AuxiliaryOptimizers.
      apply_separate_scaling: Whether gradients are clipped by a separate global norm for each
        optimizer instead of the global norm of all gradients.

    Raises:
      ConfigError: A limit of an auxiliary optimizer is invalid or would be ignored, or separate
        scaling is set without auxiliary optimizers.
    """
    if apply_separate_scaling and not auxiliary:
        raise ConfigError(
            "Learner.apply_separate_scaling requires auxiliary_optimizers, because it clips the "
            "gradients of each optimizer separately. Set apply_separate_scaling=False."
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
                f"{limit.owner} sets clip_gradient_..., but Learner.apply_separate_scaling is "
                "False, so the Learner's limits apply to all gradients. Set "
                "apply_separate_scaling=True, or remove the limit."
            )
        limits[aux.name] = limit if apply_separate_scaling else main
    return limits


def global_norm(grads: PyTree) -> jax.Array:
    """Returns the global norm of the gradients in float32, or 0 for an empty tree."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _clip_norm(grads: PyTree, norm: jax.Array, max_norm: float) -> PyTree:
    factor = jnp.minimum(1.0, max_norm / norm)  # If the norm is 0, the factor is 1.
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
