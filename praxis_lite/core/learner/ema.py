"""The exponential moving average (EMA) of trained weights, enabled by `Learner.ema_decay`."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def moving_average(average: PyTree, params: PyTree, decay: float, num_updates: jax.Array) -> PyTree:
    """Returns the updated average: decay * average + (1 - decay) * params.

    As in Pax's `apply_ema_weights`, the average starts as a copy of the initial weights, and the
    decay in update n is at most (1 + n) / (10 + n), so that the initial weights fade out quickly.

    Args:
      average: Tree with the structure of `params`. Its dtypes are preserved.
      params: Weights before the update. As in Pax, the average lags by one update.
      decay: Decay in [0, 1).
      num_updates: Number of updates before this one.
    """
    limited = jnp.minimum(decay, (1.0 + num_updates) / (10.0 + num_updates))
    return jax.tree.map(
        lambda a, p: (a - (1.0 - limited) * (a - p)).astype(a.dtype), average, params
    )
