"""L1, L2, decoupled weight decay and EWC for any optimizer, as in Pax."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.learner.path_masks import Patterns, path_mask
from praxis_lite.optimizers.optimizer_settings import require_not_negative


def regularized(
    learning_rate: optax.ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    l1_regularizer_weight: float = 0.0,
    l2_regularizer_weight: float = 0.0,
    decoupled_weight_decay: float = 0.0,
    skip_lp_1d_vectors: bool = False,
    skip_lp_regularization: Patterns = (),
    ewc_regularizer_weight: float = 0.0,
) -> optax.GradientTransformation:
    """Adds L1, L2 or decoupled weight decay, and optionally EWC, to an optimizer, as in Pax.

        fdl.Partial(regularized, optimizer=fdl.Partial(adam, beta2=0.99),
                    decoupled_weight_decay=0.1, skip_lp_regularization=".*/norm")

    L1 and L2 terms are added to the gradient after the learner's clipping and before the optimizer,
    so they also affect the optimizer's slots. Decoupled decay (Loshchilov and Hutter 2019) does
    not.

    Args:
      learning_rate: A number, or a schedule that maps the number of updates to a rate.
      optimizer: Takes `learning_rate` and returns an optax transformation.
      l1_regularizer_weight: L1 factor: the sign of each weight, times this factor, is added to the
        gradient.
      l2_regularizer_weight: L2 factor: each weight, times this factor, is added to the gradient.
      decoupled_weight_decay: Decay factor: in each update, the weight times the learning rate and
        this factor is subtracted from the weight.
      skip_lp_1d_vectors: Whether to exclude scalars and vectors from L1 and L2. As in Pax,
        decoupled decay still applies to these weights.
      skip_lp_regularization: One or more patterns of weights to exclude from L1, L2 and decoupled
        decay, as in Pax's collection SKIP_LP_REGULARIZATION. The patterns are matched from the
        start of a weight's path under params (`re.match`).
      ewc_regularizer_weight: Weight of elastic weight consolidation (Kirkpatrick et al. 2017,
        arXiv:1612.00796), with all weights treated as equally important. In each update, the
        difference from the weight at the start of the job is multiplied by the learning rate and by
        half of this factor, and subtracted from the weight. Slots of the optimizer are not
        affected, but an additional slot stores each initial weight. To apply EWC only to some
        weights, use an AuxiliaryOptimizer.

    Raises:
      ConfigError: Two regularizers are set, a factor is negative, or a pattern is not a valid
        regular expression.
    """
    weights = {
        "l1_regularizer_weight": l1_regularizer_weight,
        "l2_regularizer_weight": l2_regularizer_weight,
        "decoupled_weight_decay": decoupled_weight_decay,
    }
    ewc = ewc_regularizer_weight
    require_not_negative("regularized", **weights, ewc_regularizer_weight=ewc)
    used = [name for name, weight in weights.items() if weight]
    if len(used) > 1:
        raise ConfigError(
            f"regularized: {used[0]} cannot be combined with {used[1]}, as in Pax. Set one of them "
            "to 0."
        )
    exclude = skip_lp_regularization
    lp_mask = path_mask(exclude=exclude, skip_1d_vectors=skip_lp_1d_vectors)
    # Parts before the optimizer change the gradient; parts after it change the update.
    parts = [optimizer(learning_rate=learning_rate)]
    if l1_regularizer_weight:
        l1 = optax.stateless_with_tree_map(lambda g, w: g + l1_regularizer_weight * jnp.sign(w))
        parts.insert(0, optax.masked(l1, lp_mask))
    if l2_regularizer_weight:
        parts.insert(0, optax.add_decayed_weights(l2_regularizer_weight, mask=lp_mask))
    if decoupled_weight_decay:
        rate = _scaled(learning_rate, -decoupled_weight_decay)
        parts.append(optax.add_decayed_weights(rate, mask=path_mask(exclude=exclude)))
    if ewc:
        parts.append(_decay_to_initial_weights(_scaled(learning_rate, -0.5 * ewc)))
    return optax.chain(*parts)


class EwcState(NamedTuple):
    """Slots of EWC: the number of updates, and the weights before the first update."""

    count: jax.Array  # type: ignore[assignment]  # Hides tuple.count, as in optax.
    pretrain_vars: Any


def _decay_to_initial_weights(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    def init(weights: Any) -> EwcState:
        # Copy the weights, because donation fails if the state contains an array twice.
        return EwcState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, weights))

    def update(updates: Any, state: EwcState, weights: Any = None) -> tuple[Any, EwcState]:
        factor = rate(state.count) if callable(rate) else rate
        updates = jax.tree.map(
            lambda u, w, first: u + factor * (w - first), updates, weights, state.pretrain_vars
        )
        return updates, EwcState(optax.safe_increment(state.count), state.pretrain_vars)

    return optax.GradientTransformation(init, update)


def _scaled(learning_rate: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    if callable(learning_rate):
        return lambda count: factor * learning_rate(count)
    return factor * learning_rate
