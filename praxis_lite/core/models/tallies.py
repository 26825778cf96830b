"""Whole numbers that passes count, and a weight that follows their sum over a step's batch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# In the names of a step's metrics, with the path of the tally behind.
TALLY = "tally/"


class Tally(nnx.Intermediate):
    """Whole numbers, float32, that a pass counts, such as the tokens of each expert.

    A train step sums them over its batch, each row once: over devices, micro-batches and
    microbatches of a pipeline. Then it sets a weight beside the tally by them, which no gradient
    changes: `Tally(zeros, moves="bias", rule=rule)` sets `bias` to `rule(bias, sum)`. In float32
    sums are exact below 2^24.
    """

    moves: str
    rule: Callable[[jax.Array, jax.Array], jax.Array]


def counted(tallies: Mapping[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns tallies of a pass as metrics, whose weighted means over parts are sums over parts."""
    return {f"{TALLY}{path}": (value, jnp.ones(())) for path, value in tallies.items()}


def taken(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Returns the other metrics, and the sums of the tallies by path."""
    others = {name: pair for name, pair in metrics.items() if not name.startswith(TALLY)}
    sums = {
        name.removeprefix(TALLY): jnp.round(value * weight)
        for name, (value, weight) in metrics.items() if name.startswith(TALLY)
    }
    return others, sums
