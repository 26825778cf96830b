"""A weight in blocks, a block per device, gathered when a model reads it."""

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A device's block of a weight, inside `jax.shard_map`; `praxis_lite.collectives` makes them.

    Attributes:
      block: this device's part, padding included.
      gather: from the block, or one layer's part of it where the weight is stacked, to the whole
        without padding; the gradient comes back as this device's part of the sum over devices.
      path: of the weight, for --mode=explain.
    """

    block: jax.Array
    gather: Callable[[jax.Array], jax.Array]
    path: str = "weights"

    def whole(self) -> jax.Array:
        """Returns the weight, gathered here rather than where a layer reads it."""
        with jax.named_scope(self.path):
            return self.gather(self.block)
