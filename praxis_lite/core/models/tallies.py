"""Tally: a variable with counts over a training batch that are used to update a weight."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# Prefix of tallies among a step's metrics; the rest of the name is the tally's path.
TALLY = "tally/"


class Tally(nnx.Intermediate[jax.Array]):
    """Float32 counts in a forward pass, such as the number of tokens routed to each expert.

    In a train step, the counts are summed over devices and microbatches, counting each row of the
    batch once. The sum is then used to update a weight without gradient in the same module:
    `Tally(zeros, moves="bias", rule=rule)` sets `bias` to `rule(bias, sum)`. Sums below 2^24 are
    exact.
    """

    moves: str
    rule: Callable[[jax.Array, jax.Array], jax.Array]


def as_metrics(tallies: Mapping[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns tallies as metrics with weight 1; a sum is the mean times the total weight."""
    return {f"{TALLY}{path}": (value, jnp.ones(())) for path, value in tallies.items()}


def pop_tallies(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Splits a step's metrics into the task's metrics and the tallies' sums (keyed by path)."""
    others = {name: pair for name, pair in metrics.items() if not name.startswith(TALLY)}
    # Metrics are means, but counts are integers, so rounding restores their exact sum.
    sums = {
        name.removeprefix(TALLY): jnp.round(value * weight)
        for name, (value, weight) in metrics.items()
        if name.startswith(TALLY)
    }
    return others, sums
