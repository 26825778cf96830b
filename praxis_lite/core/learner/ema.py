"""The exponential moving average (EMA) of trained weights; `Learner.ema_decay` turns it on."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def moving_average(average: PyTree, params: PyTree, decay: float, num_updates: jax.Array) -> PyTree:
    """Returns the average after another update: decay * average + (1 - decay) * params.

    Pax's `apply_ema_weights`: the first average is a copy of the initial weights, and the decay of
    update n is at most (1 + n) / (10 + n), so that these are soon forgotten.

    Args:
      average: of the params' structure; its dtypes are kept.
      params: the weights before the update: the average is one update behind, as in Pax.
      decay: in [0, 1).
      num_updates: the number of updates before this one.
    """
    decay = jnp.minimum(decay, (1.0 + num_updates) / (10.0 + num_updates))
    return jax.tree.map(lambda a, p: (a - (1.0 - decay) * (a - p)).astype(a.dtype), average, params)
