"""Pipeline: a stack of identical blocks that is distributed over pipeline stages."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require, shortened
from praxis_lite.core.models.stacked_weights import unstacked_layers
from praxis_lite.core.models.tallies import Tally
from praxis_lite.core.sharding.split_dims import DimSplit, constrain
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import require_positive, scope_of
from praxis_lite.layers.base.dims import RESIDUAL, SplitSetting, splits
from praxis_lite.layers.base.variables import abstract_block, assign, assigned_values, stacked
from praxis_lite.layers.stacking.pipelining.microbatches import (
    arrays_of,
    check_microbatches,
    num_microbatches_of,
    to_microbatches,
    to_rows,
)
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Schedule
from praxis_lite.layers.stacking.pipelining.split_model import active_cut
from praxis_lite.layers.stacking.pipelining.split_ticks import run_split_ticks
from praxis_lite.layers.stacking.pipelining.ticks import (
    StageLayout,
    Values,
    apply_layer,
    mean_update,
    pick,
    run_ticks,
)
from praxis_lite.layers.stacking.remat_policies import CheckpointPolicy, checked_policy, remat

# R repeats, S stages, P layers per stage and repeat, L layers, M microbatches. Name suffixes give
# the leading dims of arrays: x_M is [M, rows, ...], where rows are the examples of a microbatch.

PyTree = Any


class Pipeline(BaseLayer):
    """Applies `num_layers` blocks with separate weights, like Repeat, but in pipeline stages.

    The batch is divided into microbatches, which pass through the stages once (GPipe,
    arXiv:1811.06965) or several times (circular_repeat; arXiv:2104.04473, Pax). A scan runs over
    the ticks of a `Schedule`. Every array has a stage dim, which is sharded over `stage_axis`. One
    collective-permute per tick moves activations to the next stage. OneForwardOneBackward runs the
    same pipeline with the 1F1B schedule.

    Weights are stacked as [R, S, P]: layer (r S + s) P + p is on stage s. If the number of layers
    per repeat is not divisible by S, weights are stacked as [R, L / R] and assigned to the stages
    in this order, so that the last stage has fewer layers. `to_repeated` reshapes the weights to
    those of a Repeat; the same key gives both the same initial weights.

    Without a stage axis, the blocks run one after another. With a cache, the batch is a single
    microbatch. Results are the same on every mesh:
      - Dropout keys fold in the index of the layer, then the index of the microbatch.
      - Layers that couple examples (batch statistics, expert routing) process one microbatch at a
        time. For each microbatch, variables start with their values from before the pass. A float
        variable that a pass assigns (AuxLoss, Summary, BatchStat) becomes the mean over all
        microbatches. An integer variable takes the value from the last microbatch.
      - Results from idle stages, even NaN, do not affect outputs, gradients or variables.

    Args:
      block: See Repeat. Its outputs must have the dtype of its inputs.
      num_layers: Total number of layers; a multiple of circular_repeat.
      num_stages: S; ideally a multiple of the stage axis size.
      num_microbatches: M. Microbatch m consists of the examples m, m + M, ..., so that examples
        need not move if the batch is sharded over other axes. The last microbatches are padded with
        copies of an example. If blocks assign variables, which padding would affect, the batch size
        must be a multiple of M.
      microbatch_size: Maximum number of examples per microbatch; replaces num_microbatches.
      circular_repeat: R, the number of passes of a microbatch through all stages; ideally M >= S.
      stage_axis: Mesh axis over which the stage dim is sharded, or None.
      pipelined: If True, run in ticks, even without a mesh. If False, run one block after another
        on any mesh. If None, run in ticks if the mesh has several devices along stage_axis.
      stream_io: Whether to shard the microbatches over the stages as well. A second
        collective-permute per tick then moves microbatches to stage 0 and back from the last stage,
        and each stage stores consecutive examples if M is divisible by S. If False, each stage
        allocates memory for all microbatches.
      split_backward: Whether to compute weight gradients in a separate part of the ticks, without
        bubbles (zero bubble, arXiv:2401.10241); see `pipelining/split_ticks.py`. This supports
        neither forward-mode differentiation nor second derivatives.
      checkpoint_policy: Which activations from a stage's tick are saved for the backward pass; see
        Repeat. A stage's input is always saved, on the device or the host. The weights that a stage
        uses in a repeat are saved only with save_everything. With split_backward, only the input is
        saved.
      activation_split_dims_mapping: Sharding of x [B, ...]; must not contain stage_axis. If None,
        XLA chooses the sharding.

    Raises:
      ConfigError: A setting is out of range or conflicts with another setting.
    """

    cache_skips_padding = True

    splits = splits(activation=RESIDUAL)

    def __init__(
        self,
        block: Callable[..., Any],
        num_layers: int,
        *,
        num_stages: int,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        circular_repeat: int = 1,
        stage_axis: DimSplit = "stage",
        pipelined: bool | None = None,
        stream_io: bool = False,
        split_backward: bool = False,
        checkpoint_policy: CheckpointPolicy = "save_iteration_input",
        rngs: nnx.Rngs,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(
            self, num_layers=num_layers, num_stages=num_stages, circular_repeat=circular_repeat
        )
        policy = checked_policy(checkpoint_policy, self)
        check_microbatches(self, num_microbatches, microbatch_size)
        require(
            num_layers % circular_repeat == 0 and num_layers >= num_stages * circular_repeat,
            "Pipeline.num_layers",
            num_layers,
            f"a multiple of circular_repeat {circular_repeat} with at least one layer per stage "
            f"and repeat (num_stages is {num_stages})",
        )
        if split_backward and policy != "save_iteration_input":
            raise ConfigError(
                f"Pipeline.checkpoint_policy {shortened(repr(policy))} cannot be combined with "
                "split_backward, which recomputes each tick from its inputs. Set "
                "checkpoint_policy='save_iteration_input'."
            )
        self.num_layers, self.num_stages = num_layers, num_stages
        self.circular_repeat, self.stream_io = circular_repeat, stream_io
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        self.split_backward = split_backward
        self.stage_axis, self.pipelined = stage_axis, pipelined
        self.checkpoint_policy = policy
        # Split the key as Repeat does, so that the same key initializes the same layers.
        keys = jax.random.split(rngs.params(), num_layers)
        blocks = jax.vmap(lambda key: block(rngs=nnx.Rngs(key)))(keys)
        blocks = to_stack_shape(blocks, self._stack_shape)
        num_stacked = len(self._stack_shape)
        # From the innermost stacked dim: P, S (sharded) and R. If stages differ in size: L / R
        # (sharded) and R.
        for split in (None, stage_axis, None)[-num_stacked:]:
            blocks = stacked(blocks, split, num_unstackable_dims=0 if pipelined else num_stacked)
        self.blocks = blocks

    def init_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the blocks' caches, stacked as [R, S, P], or a list if weights are unstacked."""
        if (layers := self._unstacked_layers()) is not None:
            return [layer.init_cache(*args, **kwargs) for layer in layers]
        block = abstract_block(self.blocks, len(self._stack_shape))
        cache = block.init_cache(*args, **kwargs)
        stacks = jax.tree.map(lambda x: jnp.broadcast_to(x, (*self._stack_shape, *x.shape)), cache)
        return jax.tree.map(lambda x: self.layout.constrain(x, dim=1), stacks)

    def __call__(
        self, x: jax.Array, *, key: jax.Array | None = None, cache: Any = None, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Returns (x, cache).

        Args:
          x: [B, ...].
          key: Random key for dropout. If None, nothing is dropped.
          cache: The blocks' caches, or None.
          inputs: Other inputs of the blocks; the first dim of each array is B or 1.

        Raises:
          ConfigError: The first dim of an input is neither B nor 1, or the batch needs padding
            although the blocks assign variables.
        """
        if cache is None and (cut := active_cut()) is not None:
            return cut(self, x, key, inputs), None
        # Decode the batch as one microbatch, so that the cache need not be divided.
        num_microbatches = 1 if cache is not None else self.num_microbatches_of(x.shape[0])
        return self.apply_in_microbatches(x, num_microbatches, key=key, cache=cache, **inputs)

    def apply_in_microbatches(
        self, x: jax.Array, num_microbatches: int, *, key: Any, cache: Any, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Applies all blocks in `num_microbatches` microbatches, and returns (x, cache)."""
        stream_io, num_rows = self.stream_io and cache is None, x.shape[0]
        has_streams = stream_io and num_microbatches % self.num_stages == 0
        num_streams = self.num_stages if has_streams else 1
        arrays, others = arrays_of(inputs, num_rows)
        to_M = functools.partial(
            to_microbatches, num_microbatches=num_microbatches, num_streams=num_streams
        )
        inputs_M = jax.tree.map(lambda a: a[None] if a.shape[0] == 1 else to_M(a), arrays)
        run = self._run_in_ticks if self.is_in_ticks else self._run_sequentially
        outputs_M, cache, values = run(to_M(x), inputs_M, others, key, cache)
        for path, node in nnx.compat.iter_graph(self.blocks):
            if isinstance(node, Tally) and path in values:  # Tallies are summed, not averaged.
                values[path] = jnp.round(values[path] * num_microbatches)
        assign(self.blocks, values)
        outputs = to_rows(outputs_M, num_streams)[:num_rows]
        if num_streams == 1:  # Otherwise rows are also sharded over the stages.
            outputs = constrain(outputs, self.activation_split_dims_mapping)
        return outputs, cache

    def _run_in_ticks(
        self, x_M: jax.Array, inputs_M: PyTree, others: dict, key: Any, cache: PyTree
    ) -> tuple[jax.Array, PyTree, Values]:
        """Returns x_M after all blocks, the cache, and the new values of assigned variables."""
        blocks, cache = self.on_stages((self.blocks, cache))
        num_layers = self.num_layers // self.circular_repeat
        settings: dict[str, Any] = dict(
            schedule=Schedule(self.num_stages, x_M.shape[0], self.circular_repeat),
            num_layers=num_layers,
            stream_io=self.stream_io and cache is None,
            layout=self.layout,
        )
        if self.split_backward and cache is None:
            outputs_M, values = run_split_ticks(blocks, x_M, inputs_M, others, key, **settings)
        else:
            rematerialized = functools.partial(
                # There is always more than one tick.
                remat,
                checkpoint_policy=self.checkpoint_policy,
                layer=self,
                is_scanned=True,
            )
            outputs_M, cache, values = run_ticks(
                blocks, x_M, inputs_M, others, key, cache, rematerialized=rematerialized, **settings
            )
        return outputs_M, *self.off_stages((cache, values))

    def _run_sequentially(
        self, x_M: jax.Array, inputs_M: PyTree, others: dict, key: Any, cache: PyTree
    ) -> tuple[jax.Array, PyTree, Values]:
        """Passes all microbatches through one block after another.

        Returns:
          The same as `_run_in_ticks`.
        """
        num_microbatches = x_M.shape[0]

        def step(x_M: jax.Array, layer: tuple) -> tuple[jax.Array, tuple]:
            block, index, cache = layer

            def apply(x: jax.Array, microbatch: Any, cache: PyTree) -> tuple:
                # Copy the block in this trace, so that assignments to its variables stay local.
                copy = jax.tree.map(lambda a: a, block)
                inputs = jax.tree.map(lambda a: pick(a, microbatch), inputs_M)
                return apply_layer(
                    copy, x, index, microbatch, key=key, cache=cache, **inputs, **others
                )

            if num_microbatches == 1:
                x, cache, values = apply(x_M[0], 0, cache)
                return x[None], (cache, values)
            # A vmap would not support some operations, such as ragged_dot.
            x_M, _, values_M = jax.lax.map(
                lambda args: apply(args[0], args[1], None), (x_M, jnp.arange(num_microbatches))
            )
            return x_M, (None, jax.tree.map(mean_update, assigned_values(block), values_M))

        # Decoding may pass a module per layer instead of stacked weights.
        if (unstacked := self._unstacked_layers()) is not None:
            caches = [None] * self.num_layers if cache is None else list(cache)
            for i, block in enumerate(unstacked):
                with scope_of(self, block):
                    x_M, (caches[i], _) = step(x_M, (block, i, caches[i]))
            return x_M, None if cache is None else caches, {}
        blocks, cache = to_repeated((self.blocks, cache), num_stacked=len(self._stack_shape))
        layers = blocks, jnp.arange(self.num_layers), cache
        with remat(step, self.checkpoint_policy, self, is_scanned=self.num_layers > 1) as step:
            x_M, stacked_outputs = jax.lax.scan(step, x_M, layers)
        cache, values = to_stack_shape(stacked_outputs, self._stack_shape)
        return x_M, cache, values

    @property
    def layout(self) -> StageLayout:
        """How arrays with a stage dim are sharded on the current mesh."""
        return StageLayout(self.stage_axis, self.activation_split_dims_mapping)

    def num_microbatches_of(self, num_rows: int) -> int:
        """Returns the number of microbatches for a batch, and checks the batch size."""
        must_divide = bool(assigned_values(self.blocks))
        return num_microbatches_of(
            num_rows, self.num_microbatches, self.microbatch_size, must_divide=must_divide
        )

    @property
    def has_types(self) -> bool:
        """False if it runs in ticks, for which JAX has no types (docs/upstream.md)."""
        return not self.is_in_ticks

    @property
    def is_in_ticks(self) -> bool:
        """Whether to run in ticks; depends on the mesh if `pipelined` is None."""
        return self.layout.num_devices > 1 if self.pipelined is None else self.pipelined

    def on_stages(self, tree: PyTree) -> PyTree:
        """Reshapes the blocks or a cache to [R, S, P, ...], with padding if necessary."""
        if len(self._stack_shape) == 3:
            return tree
        return jax.tree.map(
            lambda a: self.layout.constrain(a, dim=1), pad_stages(tree, self.num_stages)
        )

    def off_stages(self, tree: PyTree) -> PyTree:
        """Reshapes the blocks or a cache from [R, S, P, ...] to the stored shape, unpadded."""
        if len(self._stack_shape) == 3:
            return tree
        num_layers = self.num_layers // self.circular_repeat
        return jax.tree.map(lambda a: a.reshape(a.shape[0], -1, *a.shape[3:])[:, :num_layers], tree)

    @property
    def _stack_shape(self) -> tuple[int, ...]:
        return stack_shape(self.num_layers, self.num_stages, self.circular_repeat)

    def _unstacked_layers(self) -> list[Any] | None:
        return unstacked_layers(self.blocks, self.num_layers, len(self._stack_shape))


def to_repeated(params: PyTree, *, num_stacked: int = 3) -> PyTree:
    """Reshapes variables from a Pipeline's layout [R, S, P, ...] to a Repeat's layout [L, ...].

    Args:
      params: A Pipeline's subtree of `mdl_vars["params"]`, of the gradients or of a cache.
      num_stacked: Number of stacked dims: 3, or 2 if the stages have different numbers of layers
        ([R, L / R, ...]).
    """
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[num_stacked:]), params)


def stack_shape(num_layers: int, num_stages: int, circular_repeat: int) -> tuple[int, ...]:
    """Returns a Pipeline's stacked dims: [R, S, P], or [R, L / R] if stages differ in size."""
    if num_layers % (circular_repeat * num_stages):
        return circular_repeat, num_layers // circular_repeat
    return circular_repeat, num_stages, num_layers // (circular_repeat * num_stages)


def to_stack_shape(tree: PyTree, stack_shape: tuple[int, ...]) -> PyTree:
    """Reshapes [L, ...] to [*stack_shape, ...]."""
    return jax.tree.map(lambda a: a.reshape(*stack_shape, *a.shape[1:]), tree)


def pad_stages(tree: PyTree, num_stages: int) -> PyTree:
    """Reshapes [R, L / R, ...] to [R, S, P, ...], padded with zeros after the last layer."""

    def pad(a: jax.Array) -> jax.Array:
        layers_per_stage = -(-a.shape[1] // num_stages)
        padding = (0, num_stages * layers_per_stage - a.shape[1])
        a = jnp.pad(a, [(0, 0), padding, *[(0, 0)] * (a.ndim - 2)])
        return a.reshape(a.shape[0], num_stages, layers_per_stage, *a.shape[2:])

    return jax.tree.map(pad, tree)
