"""Repeat and StackedTransformer: stacks of blocks, either scanned or called one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.models.stacked_weights import unstacked_layers, weights_to_device
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.core.sharding.split_dims import DimSplit
from praxis_lite.layers.base.activation_names import named
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import require_positive, scope_of
from praxis_lite.layers.base.variables import (
    abstract_block,
    assign,
    assigned_values,
    put_on_host,
    stacked,
)
from praxis_lite.layers.stacking.remat_policies import (
    CheckpointPolicy,
    checked_policy,
    remat,
)
from praxis_lite.layers.stacking.residual_branches import split_keys
from praxis_lite.layers.stochastics import Dropout

# Takes `rngs`, and returns a layer (x, key=, cache=, **inputs) -> (x, cache).
Block = Callable[..., Any]


class Repeat(BaseLayer):
    """Applies `num_layers` blocks with separate weights in sequence.

    By default, the blocks are scanned, so that only one block is compiled, regardless of the depth.

    Args:
      block: Takes `rngs`, and returns a layer that maps (x, key=, cache=, **inputs) to (x, cache).
        All blocks receive the same `inputs` (positions, paddings, ...). To repeat a pattern of
        several layers, pass a StackedTransformer.
      num_layers: Number of blocks.
      unroll: Whether to compile every block separately instead of scanning over blocks; the weights
        are then not stacked.
      input_dropout_prob: Dropout probability of x before the first block, as in GPT-2 and T5.
      checkpoint_policy: A name in CHECKPOINT_POLICIES, or a mapping from checkpoint names to
        places, such as {"context": "device", "query_proj": "offload"}. All other activations are
        recomputed.
      stack_split: Sharding of the stacked dim of the weights.
      offload_weights: Whether to store the blocks' matrices in host memory. The matrices of a block
        are copied to the device while the previous block computes, and again in the backward pass.
        Their gradients are stored in host memory too, except with gradient accumulation or loss
        scaling; `Learner.host_slots` controls where the optimizer slots are stored. Decoding copies
        all weights to the device.

    Raises:
      ConfigError: num_layers is not positive, the policy is unknown, or offload_weights is combined
        with unroll, stack_split or a policy that saves all weights on the device. When called: the
        policy contains a name that matches no activation.
    """

    cache_skips_padding = True

    def __init__(
        self,
        block: Block,
        num_layers: int,
        *,
        unroll: bool = False,
        input_dropout_prob: float = 0.0,
        checkpoint_policy: CheckpointPolicy = "save_nothing",
        stack_split: DimSplit = None,
        offload_weights: bool = False,
        rngs: nnx.Rngs,
    ):
        require_positive(self, num_layers=num_layers)
        policy = checked_policy(checkpoint_policy, self)
        if offload_weights:
            conflict = f"{type(self).__name__}.offload_weights cannot be combined with"
            if unroll:
                raise ConfigError(f"{conflict} unroll={unroll!r}.")
            if stack_split is not None:
                raise ConfigError(f"{conflict} stack_split={stack_split!r}.")
            if policy == "save_everything":
                raise ConfigError(
                    f"{conflict} checkpoint_policy={policy!r}, which keeps all weights on the "
                    "device for the backward pass. Choose a policy such as 'save_nothing'."
                )
        keys = jax.random.split(rngs.params(), num_layers)
        self.blocks: Any
        if unroll:
            self.blocks = nnx.List(block(rngs=nnx.Rngs(key)) for key in keys)
        else:
            blocks = jax.vmap(lambda key: block(rngs=nnx.Rngs(key)))(keys)
            self.blocks = stacked(blocks, stack_split, num_unstackable_dims=1)
            if offload_weights:
                put_on_host(self.blocks)
        self.input_dropout = Dropout(input_dropout_prob)
        self.num_layers, self.unroll = num_layers, unroll
        self.checkpoint_policy, self.offload_weights = policy, offload_weights

    def init_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the blocks' caches, stacked on a leading dim, or a list if unstacked."""
        if (blocks := self._unstacked_blocks()) is not None:
            return [block.init_cache(*args, **kwargs) for block in blocks]
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.num_layers, *x.shape)),
            abstract_block(self.blocks).init_cache(*args, **kwargs),
        )

    def _unstacked_blocks(self) -> Sequence[Any] | None:
        """Returns the blocks if their weights are not stacked, otherwise None."""
        if self.unroll:
            return self.blocks
        return unstacked_layers(self.blocks, self.num_layers)

    def __call__(
        self, x: jax.Array, *, key: jax.Array | None = None, cache: Any = None, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        keys = None if key is None else jax.random.split(key, self.num_layers)
        if key is not None:
            x = self.input_dropout(x, jax.random.fold_in(key, self.num_layers))
        blocks = self._unstacked_blocks()
        is_scanned = blocks is None and self.num_layers > 1
        step = _step(inputs, is_scanned, self.offload_weights)
        with remat(step, self.checkpoint_policy, self, is_scanned=is_scanned) as step:
            # Scan over the layers. The caches and assigned values are stacked, like the weights.
            if blocks is None:
                x, (cache, values) = jax.lax.scan(step, x, (self.blocks, keys, cache))
                assign(self.blocks, values)
                return x, cache
            caches = []
            for i, block in enumerate(blocks):
                key = None if keys is None else keys[i]
                layer = block, key, None if cache is None else cache[i]
                x, layer_cache = _apply_block(self, step, x, layer)
                caches.append(layer_cache)
        return x, None if cache is None else caches


class StackedTransformer(BaseLayer):
    """Applies `num_layers` blocks, named `x_layers_0`, `x_layers_1`, ..., in sequence.

    It is called like a block, so that a Repeat or a Pipeline can repeat it.

    Args:
      block: See Repeat. A sequence of blocks is a pattern that is repeated along the depth (window,
        global, window, global, ...). Unlike here, Pax repeats each template of a list in place.
      num_layers: Number of blocks; a multiple of the pattern's length.
      residual_droppath_prob: p for stochastic depth (arXiv:1603.09382): block i is dropped with
        probability p i / num_layers.
      input_dropout_prob: See Repeat.
      remat: Whether to recompute each block in the backward pass, except for the activations that
        `checkpoint_policy` saves.
      checkpoint_policy: See Repeat.

    Raises:
      ConfigError: num_layers is not a multiple of the pattern's length, or a setting is out of
        range.
    """

    cache_skips_padding = True

    def __init__(
        self,
        block: Block | Sequence[Block],
        num_layers: int,
        *,
        residual_droppath_prob: float = 0.0,
        input_dropout_prob: float = 0.0,
        remat: bool = False,
        checkpoint_policy: CheckpointPolicy = "save_dot_except_logits_ffn1",
        rngs: nnx.Rngs,
    ):
        require_positive(self, num_layers=num_layers)
        policy = checked_policy(checkpoint_policy, self)
        pattern = list(block) if isinstance(block, Sequence) else [block]
        num_repeats(self, pattern, num_layers)
        name = "StackedTransformer.residual_droppath_prob"
        prob = residual_droppath_prob
        require(0.0 <= prob < 1.0, name, prob, "0 <= p < 1")
        self.layer_names = tuple(f"x_layers_{i}" for i in range(num_layers))
        for i, name in enumerate(self.layer_names):
            droppath = residual_droppath_prob * i / num_layers
            settings = {"residual_droppath_prob": droppath} if droppath else {}
            setattr(self, name, pattern[i % len(pattern)](**settings, rngs=rngs))
        self.input_dropout = Dropout(input_dropout_prob)
        self.checkpoint_policy = policy if remat else "save_everything"

    def init_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the blocks' caches, keyed by block name."""
        return {name: getattr(self, name).init_cache(*args, **kwargs) for name in self.layer_names}

    def __call__(
        self, x: jax.Array, *, key: jax.Array | None = None, cache: Any = None, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        input_key, *keys = split_keys(key, 1 + len(self.layer_names))
        x, caches = self.input_dropout(x, input_key), {}
        with remat(_step(inputs), self.checkpoint_policy, self, is_scanned=False) as step:
            for name, layer_key in zip(self.layer_names, keys, strict=True):
                layer_cache = None if cache is None else cache[name]
                layer = (getattr(self, name), layer_key, layer_cache)
                x, caches[name] = _apply_block(self, step, x, layer)
                # Name x outside the rematerialized region too, for an enclosing Repeat.
                x = named(x, "transformer_layer_out")
        return x, None if cache is None else caches


# (x, (block, key, cache)) -> (x, (new cache, values that the block assigned to its variables)).
Step = Callable[[jax.Array, tuple], tuple[jax.Array, tuple]]


@jax.custom_vjp
def _prevent_hoisting(block: Any) -> Any:
    """Prevents XLA from casting the weights of all layers before the loop over layers.

    On TPU, casting inside the loop adds 1 to 3 % to the step time, but saves a tenth of the memory
    in some models (benchmarks/README.md, "Pods"). Not tested on GPU.
    """
    return jax.lax.optimization_barrier(block)


_prevent_hoisting.defvjp(lambda block: (_prevent_hoisting(block), None), lambda _, grads: (grads,))


def _step(inputs: dict[str, Any], is_scanned: bool = False, offload_weights: bool = False) -> Step:
    casts_in_loop = is_scanned and compiled_platform() == "tpu"

    def step(x: jax.Array, layer: tuple) -> tuple[jax.Array, tuple]:
        block, key, cache = layer
        if offload_weights:
            block = weights_to_device(block)
        if casts_in_loop:
            block = _prevent_hoisting(block)
        x, cache = block(x, key=key, cache=cache, **inputs)
        return named(x, "transformer_layer_out"), (cache, assigned_values(block))

    return step


def _apply_block(
    parent: BaseLayer, step: Step, x: jax.Array, layer: tuple
) -> tuple[jax.Array, Any]:
    """Applies a block in `parent` and assigns the block's variables; returns x and the cache."""
    block = layer[0]
    with scope_of(parent, block):
        x, (cache, values) = step(x, layer)
    assign(block, values)
    return x, cache


def num_repeats(layer: object, pattern: Sequence[Block], num_layers: int) -> int:
    """Returns how many times a pattern of blocks is repeated in `num_layers` layers.

    Raises:
      ConfigError: num_layers is not a multiple of the pattern's length.
    """
    if not pattern or num_layers % len(pattern):
        raise ConfigError(
            f"{type(layer).__name__}.num_layers {num_layers} is not a multiple of the pattern's "
            f"{len(pattern)} blocks. Change num_layers or the pattern."
        )
    return num_layers // len(pattern)
