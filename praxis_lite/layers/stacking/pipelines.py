"""Pipeline: a stack of equal blocks, distributed over the stages of a mesh axis."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.models.stacked_weights import unstacked_layers
from praxis_lite.core.models.tallies import Tally
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, constrain
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import require_positive, scope_of
from praxis_lite.layers.base.dims import RESIDUAL, SplitSetting, splits
from praxis_lite.layers.base.variables import assign, assigned_values, one_of_stack, stacked
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

# R repeats, S stages, P layers of one stage in one repeat, L layers, M microbatches. Suffixes of
# names are the leading dims of arrays: x_M is [M, rows, ...].

PyTree = Any


class Pipeline(BaseLayer):
    """Applies `num_layers` blocks with separate weights, like Repeat, on pipeline stages.

    The batch is divided into microbatches, which pass through the stages once (GPipe,
    arXiv:1811.06965) or several times (circular_repeat; arXiv:2104.04473, Pax). A scan runs over
    the ticks of `Schedule`: stages are a dim of every array, split over `stage_axis`, and
    activations shift to the next stage by one collective-permute per tick. OneForwardOneBackward
    runs the same pipeline with the 1F1B schedule.

    Weights are stacked as [R, S, P]: layer (r S + s) P + p is on stage s. If S does not divide the
    layers of a repeat, they are stacked as [R, L / R] and assigned to stages in that order; the
    last stage has fewer. They are the weights of a Repeat, reshaped (`to_repeated`), and the same
    key initializes the same weights.

    Without a stage axis the blocks run one after the other. With a cache the batch is one
    microbatch. Results are the same on every mesh:
      - Dropout's key has the layer's index folded in, then the microbatch's.
      - Layers that couple rows (batch statistics, routing of experts) see one microbatch. Variables
        that a pass assigns (AuxLoss, Summary, BatchStat) become their mean over the microbatches,
        each of which starts with the values before the pass. Integer variables become those of the
        last microbatch.
      - Results of idle stages, even NaN, do not affect outputs, gradients or variables.

    Args:
      block: See Repeat; outputs must have the dtype of the inputs.
      num_layers: Number of layers in all stages; a multiple of circular_repeat.
      num_stages: S; ideally the size of the stage axis, or a multiple.
      num_microbatches: M. Microbatch m consists of the rows m, m + M, ..., so that rows that are
        split over other axes need not move. The last microbatches are padded with copies of a row.
        If blocks assign variables, which would count the copies, M must divide the batch.
      microbatch_size: Alternatively, the maximum number of rows of a microbatch.
      circular_repeat: R, how often a microbatch passes through all stages; ideally M >= S.
      stage_axis: Split of the dim of stages: a mesh axis, or None.
      pipelined: True: run in ticks, even without a mesh. False: run one block after the other on
        any mesh. None: run in ticks if the mesh has several devices along stage_axis.
      stream_io: Whether to split the microbatches over the stages as well; they rotate to stage 0
        and from the last stage by a second collective-permute per tick. False: each stage has
        memory for all microbatches. If S divides M, stage s has consecutive rows.
      split_backward: Whether to compute gradients of weights in a separate part of the ticks,
        without bubbles (zero bubble, arXiv:2401.10241); see `pipelining/split_ticks.py`. Supports
        neither forward-mode differentiation nor second derivatives.
      checkpoint_policy: What the backward pass saves of a stage's tick, see Repeat. The input of a
        stage is always saved, on the device or the host; its weights of a repeat only by
        save_everything. With split_backward, only the input is saved.
      activation_split_dims_mapping: Split of x [rows, ...]; must not contain stage_axis. None: XLA
        chooses it.

    Raises:
      ConfigError: A setting is out of range or contradicts another.
    """

    cache_skips_padding = True

    splits = splits(activation=RESIDUAL)
    activation_split_dims_mapping: SplitDims

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
            "Pipeline.num_layers", num_layers,
            f"a multiple of circular_repeat {circular_repeat}, with at least one layer for each of "
            f"the num_stages {num_stages} in each repeat",
        )
        require(
            not split_backward or policy == "save_iteration_input",
            "Pipeline.checkpoint_policy", policy,
            "'save_iteration_input' with split_backward, which recomputes each tick from its "
            "inputs",
        )
        self.num_layers, self.num_stages = num_layers, num_stages
        self.circular_repeat, self.stream_io = circular_repeat, stream_io
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        self.split_backward = split_backward
        self.stage_axis, self.pipelined = stage_axis, pipelined
        self.checkpoint_policy = policy
        # Like Repeat, so that the same key initializes the same layers.
        keys = jax.random.split(rngs.params(), num_layers)
        blocks = jax.vmap(lambda key: block(rngs=nnx.Rngs(key)))(keys)
        blocks = to_stack_shape(blocks, self._stack_shape)
        num_stacked = len(self._stack_shape)
        for split in (None, stage_axis, None)[-num_stacked:]:
            blocks = stacked(blocks, split, num_dims_apart=0 if pipelined else num_stacked)
        self.blocks = blocks

    def init_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the blocks' caches, stacked as [R, S, P]; a list for unstacked weights."""
        if (layers := self._unstacked_layers()) is not None:
            return [layer.init_cache(*args, **kwargs) for layer in layers]
        block = one_of_stack(self.blocks, len(self._stack_shape))
        cache = block.init_cache(*args, **kwargs)
        stacks = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (*self._stack_shape, *x.shape)), cache
        )
        return jax.tree.map(lambda x: self.layout.constrain(x, dim=1), stacks)

    def __call__(
        self, x: jax.Array, *, key: jax.Array | None = None, cache: Any = None, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Returns (x, cache). The first dim of arrays in `inputs` is x's number of rows, or 1.

        Raises:
          ConfigError: An input has a different number of rows, or blocks that assign variables
            would see padding rows.
        """
        if cache is None and (cut := active_cut()) is not None:
            return cut(self, x, key, inputs), None
        # In decoding the batch is one microbatch; otherwise the cache would have to be divided too.
        num_microbatches = 1 if cache is not None else self.num_microbatches_of(x.shape[0])
        return self.apply_in_microbatches(x, num_microbatches, key=key, cache=cache, **inputs)

    def apply_in_microbatches(
        self, x: jax.Array, num_microbatches: int, *, key: Any, cache: Any, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Returns (x, cache), computed in this number of microbatches."""
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
            if isinstance(node, Tally) and path in values:  # Its sum, not the mean.
                values[path] = jnp.round(values[path] * num_microbatches)
        assign(self.blocks, values)
        outputs = to_rows(outputs_M, num_streams)[:num_rows]
        if num_streams == 1:  # Otherwise rows are also split over the stages.
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
            num_layers=num_layers, stream_io=self.stream_io and cache is None, layout=self.layout,
        )
        if self.split_backward and cache is None:
            outputs_M, values = run_split_ticks(blocks, x_M, inputs_M, others, key, **settings)
        else:
            rematerialized = functools.partial(
                # There is always more than one tick.
                remat, checkpoint_policy=self.checkpoint_policy, layer=self, is_scanned=True
            )
            outputs_M, cache, values = run_ticks(
                blocks, x_M, inputs_M, others, key, cache, rematerialized=rematerialized, **settings
            )
        return outputs_M, *self.off_stages((cache, values))

    def _run_sequentially(
        self, x_M: jax.Array, inputs_M: PyTree, others: dict, key: Any, cache: PyTree
    ) -> tuple[jax.Array, PyTree, Values]:
        """Implements `run_ticks` by passing all microbatches through block after block."""
        num_microbatches = x_M.shape[0]

        def step(x_M: jax.Array, layer: tuple) -> tuple[jax.Array, tuple]:
            block, index, cache = layer

            def apply(x: jax.Array, microbatch: Any, cache: PyTree) -> tuple:
                # A copy that belongs to this trace, so that its assignments stay local.
                copy = jax.tree.map(lambda a: a, block)
                inputs = jax.tree.map(lambda a: pick(a, microbatch), inputs_M)
                return apply_layer(
                    copy, x, index, microbatch, key=key, cache=cache, **inputs, **others
                )

            if num_microbatches == 1:
                x, cache, values = apply(x_M[0], 0, cache)
                return x[None], (cache, values)
            # A map, because vmap does not support some operations (ragged_dot).
            x_M, _, values_M = jax.lax.map(
                lambda given: apply(given[0], given[1], None), (x_M, jnp.arange(num_microbatches))
            )
            return x_M, (None, jax.tree.map(mean_update, assigned_values(block), values_M))

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
        """The layout of stages on the current mesh."""
        return StageLayout(self.stage_axis, self.activation_split_dims_mapping)

    def num_microbatches_of(self, num_rows: int) -> int:
        """Returns M for a batch, after checking it."""
        must_divide = bool(assigned_values(self.blocks))
        return num_microbatches_of(
            num_rows, self.num_microbatches, self.microbatch_size, must_divide=must_divide
        )

    @property
    def is_in_ticks(self) -> bool:
        """Whether this runs in ticks: `pipelined`, or (None) if stages are on several devices."""
        return self.layout.num_devices > 1 if self.pipelined is None else self.pipelined

    def on_stages(self, tree: PyTree) -> PyTree:
        """Returns the blocks, or a cache, as [R, S, P, ...]."""
        if len(self._stack_shape) == 3:
            return tree
        return jax.tree.map(
            lambda a: self.layout.constrain(a, dim=1), pad_stages(tree, self.num_stages)
        )

    def off_stages(self, tree: PyTree) -> PyTree:
        """Inverts `on_stages`."""
        if len(self._stack_shape) == 3:
            return tree
        return unpad_stages(tree, self.num_layers // self.circular_repeat)

    @property
    def _stack_shape(self) -> tuple[int, ...]:
        return stack_shape(self.num_layers, self.num_stages, self.circular_repeat)

    def _unstacked_layers(self) -> list[Any] | None:
        return unstacked_layers(self.blocks, self.num_layers, len(self._stack_shape))


def to_repeated(params: PyTree, *, num_stacked: int = 3) -> PyTree:
    """Reshapes a Pipeline's variables [R, S, P, ...] to those of a Repeat, [L, ...].

    Args:
      params: A Pipeline's part of `mdl_vars["params"]`, of gradients, or of a cache.
      num_stacked: Number of stacked dims; 2 if stages have unequal numbers of layers,
        [R, L / R, ...].
    """
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[num_stacked:]), params)


def from_repeated(params: PyTree, *, num_stages: int, circular_repeat: int = 1) -> PyTree:
    """Reshapes a Repeat's variables [L, ...] to those of a Pipeline.

    Raises:
      ConfigError: The number of repeats does not divide the number of layers.
    """
    num_layers = jax.tree.leaves(params)[0].shape[0]
    if num_layers % circular_repeat:
        raise ConfigError(
            f"from_repeated: circular_repeat {circular_repeat} does not divide the {num_layers} "
            "layers. Make num_layers a multiple of it."
        )
    return to_stack_shape(params, stack_shape(num_layers, num_stages, circular_repeat))


def stack_shape(num_layers: int, num_stages: int, circular_repeat: int) -> tuple[int, ...]:
    """Returns the shape of a Pipeline's stack: [R, S, P], or [R, L / R] for unequal stages."""
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


def unpad_stages(tree: PyTree, num_layers: int) -> PyTree:
    """Inverts `pad_stages`; `num_layers` is the number of layers in a repeat."""
    return jax.tree.map(
        lambda a: a.reshape(a.shape[0], -1, *a.shape[3:])[:, :num_layers], tree
    )
