"""A stack of equal blocks: scanned (one block's program whatever the depth) or unrolled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.sharding.split_dims import DimSplit
from praxis_lite.weights import BaseLayer, assign, assigned_values, require_positive, stacked

# What the backward pass keeps of a block's forward pass. Names are Pax's AutodiffCheckpointType.
CHECKPOINT_POLICIES: dict[str, Callable[..., bool]] = {
    "save_everything": jax.checkpoint_policies.everything_saveable,
    "save_nothing": jax.checkpoint_policies.nothing_saveable,
    "save_dot_only": jax.checkpoint_policies.checkpoint_dots,
    "save_dot_with_no_batch_dims": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
}


class Repeat(BaseLayer):
    """Applies `num_layers` blocks, each with weights of its own, one after the other.

    Args:
      block: called with `rngs`, returns a layer that maps (x, key=, cache=, **inputs) to
        (x, cache); `inputs` (positions, paddings, ...) are the same for every block.
      num_layers: how many.
      unroll: compile every block apart rather than scan one; the weights are then unstacked.
      checkpoint_policy: a name in CHECKPOINT_POLICIES.
      stack_split: how the stacked dim of the weights splits.
    """

    def __init__(
        self,
        block: Callable[..., Any],
        num_layers: int,
        *,
        unroll: bool = False,
        checkpoint_policy: str = "save_nothing",
        stack_split: DimSplit = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, num_layers=num_layers)
        if checkpoint_policy not in CHECKPOINT_POLICIES:
            raise ConfigError(
                f"Repeat.checkpoint_policy is {checkpoint_policy!r}; wanted is one of "
                f"{sorted(CHECKPOINT_POLICIES)}."
                f"{did_you_mean(str(checkpoint_policy), CHECKPOINT_POLICIES)}"
            )
        keys = jax.random.split(rngs.params(), num_layers)
        if unroll:
            self.blocks = nnx.List(block(rngs=nnx.Rngs(key)) for key in keys)
        else:
            blocks = jax.vmap(lambda key: block(rngs=nnx.Rngs(key)))(keys)
            self.blocks = stacked(blocks, stack_split)
        self.num_layers, self.unroll = num_layers, unroll
        self.checkpoint_policy = checkpoint_policy

    def init_cache(self, *args: Any) -> Any:
        """Returns the blocks' caches, stacked on a leading dim."""
        # A block's cache depends on its settings, not its weights: the stack serves as one block.
        block = self.blocks[0] if self.unroll else self.blocks
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.num_layers, *x.shape)), block.init_cache(*args)
        )

    def __call__(
        self, x: jax.Array, *, key: jax.Array | None = None, cache: Any = None, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        keys = None if key is None else jax.random.split(key, self.num_layers)

        def step(x: jax.Array, layer: tuple) -> tuple[jax.Array, Any]:
            block, key, cache = layer
            x, cache = block(x, key=key, cache=cache, **inputs)
            return x, (cache, assigned_values(block))

        if self.checkpoint_policy != "save_everything":
            step = jax.checkpoint(step, policy=CHECKPOINT_POLICIES[self.checkpoint_policy])
        if not self.unroll:
            x, (cache, values) = jax.lax.scan(step, x, (self.blocks, keys, cache))
            assign(self.blocks, values)
            return x, cache
        caches = []
        for i, block in enumerate(self.blocks):
            layer_key, layer_cache = jax.tree.map(lambda leaf, i=i: leaf[i], (keys, cache))
            x, (layer_cache, values) = step(x, (block, layer_key, layer_cache))
            assign(block, values)
            caches.append(layer_cache)
        if cache is None:
            return x, None
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
