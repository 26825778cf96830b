"""Explicit collectives: a weight of which each device holds a block, gathered when it is used."""

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A device's block of a weight, inside `jax.shard_map`.

    Attributes:
      block: this device's part, padding included.
      gather: from the block, or one layer's part of it where the weight is stacked, to the whole
        of true shape; the gradient comes back as this device's part of the sum over devices.
    """

    block: jax.Array
    gather: Callable[[jax.Array], jax.Array]

    def whole(self) -> jax.Array:
        return self.gather(self.block)
