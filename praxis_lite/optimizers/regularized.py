"""Regularisation around any optimizer, as every optimizer of Pax has it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from praxis_lite.errors import ConfigError
from praxis_lite.optimizers.path_masks import Patterns, path_mask
from praxis_lite.optimizers.settings import require_not_negative


def regularized(
    learning_rate: float | Callable[[jax.Array], jax.Array],
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    l1_regularizer_weight: float = 0.0,
    l2_regularizer_weight: float = 0.0,
    decoupled_weight_decay: float = 0.0,
    skip_lp_1d_vectors: bool = False,
    skip_lp_regularization: Patterns = (),
) -> optax.GradientTransformation:
    """Returns an optimizer with one of three regularisations, as Pax applies them to any.

        fdl.Partial(regularized, optimizer=fdl.Partial(adam, beta2=0.99),
                    decoupled_weight_decay=0.1, skip_lp_regularization=".*/norm")

    L1 and L2 go into the gradient that the optimizer sees, after the learner's clipping, and so
    into its slots. The decoupled decay (Loshchilov and Hutter 2019) goes past it.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      optimizer: called with `learning_rate`, returns the transformation.
      l1_regularizer_weight: times the signs of the weights, added to the gradient.
      l2_regularizer_weight: times the weights, added to the gradient.
      decoupled_weight_decay: times the learning rate and the weights, taken from the weights.
      skip_lp_1d_vectors: scalars and vectors have no L1 and L2; the decoupled decay they have, in
        Pax too.
      skip_lp_regularization: a pattern, or several, of the weights that have none of the three:
        those of Pax's collection SKIP_LP_REGULARIZATION. Matched from the start of a weight's path
        under params (`re.match`).

    Raises:
      ConfigError: two regularisations are set, a weight is negative, or a pattern is no regular
        expression.
    """
    weights = {
        "l1_regularizer_weight": l1_regularizer_weight,
        "l2_regularizer_weight": l2_regularizer_weight,
        "decoupled_weight_decay": decoupled_weight_decay,
    }
    require_not_negative("regularized", **weights)
    used = [name for name, weight in weights.items() if weight]
    if len(used) > 1:
        raise ConfigError(
            f"regularized: {used[0]} and {used[1]} are both set; wanted is one regularisation, as "
            "in Pax. Set the other to 0."
        )
    exclude = skip_lp_regularization
    lp_mask = path_mask(exclude=exclude, skip_1d_vectors=skip_lp_1d_vectors)
    parts = [optimizer(learning_rate=learning_rate)]
    if l1_regularizer_weight:
        l1 = optax.stateless_with_tree_map(lambda g, w: g + l1_regularizer_weight * jnp.sign(w))
        parts.insert(0, optax.masked(l1, lp_mask))
    if l2_regularizer_weight:
        parts.insert(0, optax.add_decayed_weights(l2_regularizer_weight, mask=lp_mask))
    if decoupled_weight_decay:
        rate = _scaled(learning_rate, -decoupled_weight_decay)
        parts.append(optax.add_decayed_weights(rate, mask=path_mask(exclude=exclude)))
    return optax.chain(*parts)


def _scaled(
    learning_rate: float | Callable[[jax.Array], jax.Array], factor: float
) -> float | Callable[[jax.Array], jax.Array]:
    if callable(learning_rate):
        return lambda count: factor * learning_rate(count)
    return factor * learning_rate
