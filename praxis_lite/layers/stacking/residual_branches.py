"""Residual branches `x + f(x)` with norms placed by a norm policy."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.stochastics import Dropout, StochasticResidual

# Positions of the norm: x + f(norm(x)), x + norm(f(x)), x + norm(f(norm(x))) with two norms, or
# norm(x + f(x)).
NORM_POLICIES = ("pre", "post", "primer_hybrid", "post_skip")


def check_norm_policy(norm_policy: str, layer: object) -> None:
    """Raises ConfigError if a norm policy is unknown."""
    require_choice(f"{type(layer).__name__}.norm_policy", norm_policy, NORM_POLICIES)


class ResidualBranch(BaseLayer):
    """Base class for layers that compute a branch and add it to their inputs.

    Subclasses call `_with_branch`.

    Args:
      input_dims: Size of the inputs.
      output_dims: Size of the outputs.
      norm_policy: "pre", "post", "primer_hybrid" (a norm before and one after the branch) or
        "post_skip" (after the skip connection).
      ln_tpl: Template of the norm, called with (dims, rngs=).
      add_skip_connection: Whether to add the inputs to the branch's outputs. If False, only the
        branch's outputs are returned.
      residual_weight: Factor that multiplies the branch's outputs. As in Pax, it has no effect if
        residual_droppath_prob is set.
      residual_dropout_prob: Dropout probability of the branch's outputs.
      residual_droppath_prob: Probability that an example skips the branch (stochastic depth).

    Raises:
      ConfigError: The norm policy is unknown, or residual_droppath_prob is set without a skip
        connection.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        *,
        norm_policy: str = "pre",
        ln_tpl: Callable[..., Any] = LayerNorm,
        add_skip_connection: bool = True,
        residual_weight: float = 1.0,
        residual_dropout_prob: float = 0.0,
        residual_droppath_prob: float = 0.0,
        rngs: nnx.Rngs,
    ):
        check_norm_policy(norm_policy, self)
        if residual_droppath_prob and not add_skip_connection:
            raise ConfigError(
                f"{type(self).__name__}.residual_droppath_prob {residual_droppath_prob} cannot be "
                "combined with add_skip_connection=False, because examples that skip the branch "
                "would have no outputs. Set residual_droppath_prob=0 or add_skip_connection=True."
            )
        # Norms on the outputs have the output dims, norms on the inputs the input dims.
        is_hybrid, is_outer = norm_policy == "primer_hybrid", norm_policy in ("post", "post_skip")
        dims = output_dims if is_outer else input_dims
        self.layer_norm = None if is_hybrid else ln_tpl(dims, rngs=rngs)
        self.pre_layer_norm = ln_tpl(input_dims, rngs=rngs) if is_hybrid else None
        self.post_layer_norm = ln_tpl(output_dims, rngs=rngs) if is_hybrid else None
        self.residual_dropout = Dropout(residual_dropout_prob)
        self.residual_droppath = StochasticResidual(
            survival_prob=1.0 - residual_droppath_prob,
            residual_weight=1.0 if residual_droppath_prob else residual_weight,
        )
        self.norm_policy, self.add_skip_connection = norm_policy, add_skip_connection

    def _with_branch(
        self,
        inputs: jax.Array,
        branch: Callable[[jax.Array], jax.Array],
        dropout_key: jax.Array | None,
        droppath_key: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        """Adds the branch to the inputs. The norms receive `key`, which is None in evaluation."""

        def join(inputs: jax.Array, outputs: jax.Array) -> jax.Array:
            outputs = self.residual_dropout(outputs, dropout_key)
            if not self.add_skip_connection:
                return outputs
            return self.residual_droppath(inputs, outputs, droppath_key)

        norms = (self.layer_norm, self.pre_layer_norm, self.post_layer_norm)
        return normed_branch(self.norm_policy, norms, inputs, branch, join, key)


def normed_branch(
    norm_policy: str,
    norms: tuple[Any, Any, Any],
    inputs: jax.Array,
    branch: Callable[[jax.Array], jax.Array],
    join: Callable[[jax.Array, jax.Array], jax.Array],
    key: jax.Array | None,
) -> jax.Array:
    """Returns `join(inputs, branch(inputs))` with norms placed by a policy.

    Args:
      norm_policy: A name in NORM_POLICIES.
      norms: (the only norm, norm before the branch, norm after the branch). "primer_hybrid" uses
        the last two, other policies the first.
      inputs: Inputs of the branch.
      branch: A function of the (normalized) inputs.
      join: Combines the inputs with the branch's outputs.
      key: Passed only in training, for norms with batch statistics.
    """
    norm, norm_before, norm_after = norms
    before = {"pre": norm, "primer_hybrid": norm_before}.get(norm_policy)
    after = {"post": norm, "primer_hybrid": norm_after}.get(norm_policy)
    outputs = branch(inputs if before is None else before(inputs, key=key))
    outputs = join(inputs, outputs if after is None else after(outputs, key=key))
    return norm(outputs, key=key) if norm_policy == "post_skip" else outputs


def split_keys(key: jax.Array | None, num: int) -> Any:
    """Splits a key into `num` keys, or returns a tuple of `num` Nones if the key is None."""
    return (None,) * num if key is None else jax.random.split(key, num)
