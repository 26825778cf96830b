"""Tensor parallelism with explicit collectives, enabled by a layer's `tensor_parallel` setting.

The layer and its weights do not change. Each device runs the layer with its shard of the heads or
hidden dims on the tokens that it receives. Outputs are summed over the mesh axis of these dims.
Without this setting, the compiler gathers and sums everything at once, and does not overlap
communication with computation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite.core.collectives.vmapped_axes import manual_axes_for
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.padding import padded_shape
from praxis_lite.core.sharding.split_dims import (
    DimSplit,
    SplitDims,
    to_partition_spec,
    without_axes,
)
from praxis_lite.layers.base.calls import check_collectives_setting
from praxis_lite.layers.base.dense import Dense
from praxis_lite.layers.stacking.collective_matmul import gather_and_scatter, ring_matmul


class TensorParallelLayer(Protocol):
    """A layer with a `tensor_parallel` setting."""

    @property
    def tensor_parallel(self) -> str | None: ...


class ShardedLayer(NamedTuple):
    """An attention or feed-forward layer to run with explicit collectives.

    Attributes:
      layer: A layer with a `tensor_parallel` setting.
      function: Takes (layer with one device's weights, inputs [B, T, D], per-row arrays), and
        returns the outputs [B, T, D].
      split: Sharding of inputs and outputs.
      reads_sequences: Whether a token's outputs depend on other tokens in the same sequence.
      output: Attribute name of the last projection, such as "post". Its bias is added only once.
      prepared: Takes (path, weight, features dim, number of devices), and returns the weight to
        shard. If None, the weight is padded with zeros to a multiple of the number of devices.
    """

    layer: TensorParallelLayer
    function: Callable[[Any, jax.Array, Mapping[str, jax.Array]], jax.Array]
    split: SplitDims
    reads_sequences: bool
    output: str
    prepared: Callable[[tuple, jax.Array, int, int], jax.Array] | None = None

    @property
    def name(self) -> str:
        return f"{type(self.layer).__name__}.tensor_parallel"

    @property
    def method(self) -> str:
        method = self.layer.tensor_parallel
        assert method is not None, "With None, the compiler shards the layer."
        return method

    @property
    def num_row_dims(self) -> int:
        """Number of leading dims that per-row arrays share with the inputs: [B] or [B, T]."""
        return 1 if self.reads_sequences else 2


class WeightShard(NamedTuple):
    """A weight that is passed to the `jax.shard_map`.

    Attributes:
      path: Path of the weight in the layer.
      array: The weight in the compute dtype, padded to be evenly divisible by `spec`.
      spec: PartitionSpec of the weight.
      shape: Shape before this padding.
    """

    path: tuple
    array: jax.Array
    spec: PartitionSpec
    shape: tuple[int, ...]

    def of_device(self, block: jax.Array, sharded: ShardedLayer, axis: str) -> jax.Array:
        """Gathers the weight along all dims except the features dim, from a device's block."""
        keeps_features = sharded.method != "weights"
        # Gather along `axis` first, so that the last and largest gather is along another dim.
        dims = sorted(range(len(self.spec)), key=lambda dim: axis not in axes_of(self.spec[dim]))
        for dim in dims:
            axes = axes_of(self.spec[dim])
            if axes and not (keeps_features and axis in axes):
                block = jax.lax.all_gather(block, axes, axis=dim, tiled=True)
                block = jax.lax.slice_in_dim(block, 0, self.shape[dim], axis=dim)
        # Outputs are summed over the devices, so only one of them adds the bias.
        if keeps_features and self.path[0] == sharded.output and self.path[-1] == "b":
            return jnp.where(jax.lax.axis_index(axis) == 0, block, 0)
        return block


def shard_weights(
    sharded: ShardedLayer, axis: str, dtype: Any
) -> tuple[list[WeightShard], Callable[[list[jax.Array]], Any]]:
    """Returns a layer's weights, and a function that builds the layer from a device's blocks.

    Args:
      sharded: The layer.
      axis: Mesh axis over which the features are sharded.
      dtype: Compute dtype.

    Raises:
      ConfigError: The method does not support the sharding of a weight. The message contains the
        path of the weight.
    """
    graphdef, state = nnx.compat.split(sharded.layer)
    leaves = list(nnx.to_flat_state(state))
    parts = [_part(sharded, axis, dtype, path, leaf) for path, leaf in leaves]

    def layer(blocks: list[jax.Array]) -> Any:
        flat = [
            (part.path, nnx.Param(part.of_device(block, sharded, axis)))
            for part, block in zip(parts, blocks, strict=True)
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(flat))

    return parts, layer


def _part(
    sharded: ShardedLayer, axis: str, dtype: Any, path: tuple, leaf: nnx.Variable
) -> WeightShard:
    mesh, array = jax.sharding.get_abstract_mesh(), leaf.get_value()
    split = leaf.get_metadata().get("split_dims_mapping") or ()
    spec = without_axes(to_partition_spec(split, mesh.axis_names, rank=array.ndim), excluded_axes())
    dim = next((d for d, entry in enumerate(spec) if axis in axes_of(entry)), None)
    _check_output(sharded, path, dim)
    if dim is not None and sharded.method != "weights":
        require(
            axes_of(spec[dim]) == (axis,),
            f"The sharding of dim {dim} of {'/'.join(map(str, path))}",
            spec[dim],
            f"only {axis!r}, because {sharded.name} is {sharded.method!r}",
            "Shard another dim over the other axes, or set tensor_parallel='weights'.",
        )
        if sharded.prepared is not None:
            array = sharded.prepared(path, array, dim, mesh.shape[axis])
    # Do not cast biases: their gradients must be summed over tokens in the bias's dtype.
    if array.ndim > 1 and path[-1] != "b":
        array = array.astype(dtype)
    return WeightShard(path, pad_to_split(array, spec), spec, array.shape)


def _check_output(sharded: ShardedLayer, path: tuple, dim: int | None) -> None:
    """Checks that partial outputs from shards of the features add up to the layer's outputs.

    Raises:
      ConfigError: A weight of the output projection is neither sharded along the features nor a
        bias, or the projection scales its outputs as a whole.
    """
    if sharded.method == "weights" or path[0] != sharded.output:
        return
    output = getattr(sharded.layer, sharded.output)
    is_scaled = any(
        isinstance(node, Dense) and not node.product.is_sum_of_shards()
        for _, node in nnx.compat.iter_graph(output)
    )
    if is_scaled or (dim is None and path[-1] not in ("b", "lora_b")):
        reason = (
            "its matmul has one scale (for rounding or DoRA) for all features"
            if is_scaled
            else "the outputs must be a sum over features plus a bias"
        )
        raise ConfigError(
            f"{sharded.name} is {sharded.method!r}, which does not support the weight "
            f"{'/'.join(map(str, path))}, because {reason}. Set tensor_parallel to None or "
            "'weights'."
        )


def excluded_axes() -> tuple[str, ...]:
    """Returns the mesh axes that are already manual or have only one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return (*mesh.manual_axes, *(axis for axis, size in mesh.shape.items() if size == 1))


def pad_to_split(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Pads x with zeros until its dims are divisible by the sizes of their mesh axes."""
    return pad_to_shape(x, padded_shape(x.shape, spec, jax.sharding.get_abstract_mesh().shape))


def pad_to_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Pads x with zeros at the end of its dims."""
    missing = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, missing) if any(map(any, missing)) else x


# Values of the setting, with a description of the data that is communicated along the axis.
TENSOR_PARALLEL = {
    "gather": "tokens: all tokens are gathered, and the output sums are scattered",
    "ring": "tokens: one shard is sent while the device computes on the previous one",
    "two_way_ring": "tokens, as in a ring, but half of each shard is sent in each direction",
    "weights": "weights: all weights are gathered, and tokens stay on their device",
}


def check_tensor_parallel(
    layer: object, value: str | None, unsupported: Mapping[str, bool]
) -> None:
    """Checks a layer's `tensor_parallel` setting; see `check_collectives_setting`."""
    check_collectives_setting(
        layer, "tensor_parallel", value, TENSOR_PARALLEL, unsupported, "the layer"
    )


def tensor_parallel_axis(layer: Any, features_split: DimSplit) -> str | None:
    """Returns the mesh axis for a layer's explicit collectives, or None if the layer uses none.

    None is returned if the setting is None, if there is no mesh, or if the axis has one device or
    is already manual.

    Args:
      layer: A layer with a `tensor_parallel` setting.
      features_split: Sharding of the heads or hidden dims.

    Raises:
      ConfigError: The features are not sharded over exactly one axis.
    """
    setting, mesh = layer.tensor_parallel, jax.sharding.get_abstract_mesh()
    if setting is None or mesh.empty:
        return None
    axes = axes_of(to_partition_spec((features_split,), mesh.axis_names)[0])
    if len(axes) != 1:
        raise ConfigError(
            f"{type(layer).__name__}.tensor_parallel is {setting!r}, which requires heads or "
            "hidden dims sharded over one mesh axis, but their entry in weight_split_dims_mapping "
            f"is {features_split!r}. Change the entry, or set tensor_parallel=None."
        )
    return None if mesh.shape[axes[0]] == 1 or axes[0] in mesh.manual_axes else axes[0]


def run_tensor_parallel(
    sharded: ShardedLayer, axis: str, x: jax.Array, rows: Mapping[str, jax.Array | None]
) -> jax.Array:
    """Runs `sharded.function` on x [B, T, D] with explicit collectives over `axis`.

    All axes over which x or a weight is sharded become manual. A weight that is also sharded over
    other axes (fully sharded data parallelism) is cast to the dtype of x and gathered, and its
    gradient is reduce-scattered. Weight gradients are summed over shards of tokens in the dtype of
    x. Batch, time, heads and hidden dims are padded with zeros to multiples of the number of
    devices.

    Args:
      sharded: The layer and its function.
      axis: Result of `tensor_parallel_axis`.
      x: Inputs [B, T, D].
      rows: Per-row arrays, keyed by name: [B or 1, ...], or [B, T] if the layer does not read
        sequences. Values may be None.

    Raises:
      ConfigError: The setting does not support the sharding of x or of a weight.
    """
    mesh = jax.sharding.get_abstract_mesh()
    method, (B, T, _) = sharded.method, x.shape
    spec = to_partition_spec(sharded.split or (), mesh.axis_names, rank=x.ndim)
    dim = _dim_of_tokens(sharded, axis, spec)
    spec = without_axes(spec, excluded_axes())
    weights, layer_of = shard_weights(sharded, axis, x.dtype)
    # Each device receives the rows of all devices along the axis, unless tokens stay local.
    rows_spec = (spec if method == "weights" else without_axes(spec, (axis,)))[
        : sharded.num_row_dims
    ]
    x = pad_to_split(x, spec)
    row_arrays = {name: row for name, row in rows.items() if row is not None}
    row_specs = {
        name: PartitionSpec(
            *(None if n == 1 else entry for n, entry in zip(row.shape, rows_spec, strict=False))
        )
        for name, row in row_arrays.items()
    }
    # Per-row arrays are padded like x, except for dims that are broadcast.
    expected = x.shape[: sharded.num_row_dims]
    padded = {
        name: pad_to_shape(
            row,
            [n if n == 1 or d >= len(expected) else expected[d] for d, n in enumerate(row.shape)],
        )
        for name, row in row_arrays.items()
    }

    def on_one_device(
        blocks: list[jax.Array], x: jax.Array, rows: Mapping[str, jax.Array]
    ) -> jax.Array:
        layer = layer_of(blocks)

        def term(x: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
            return sharded.function(layer, x, rows)

        # All weights have been gathered, so no sum over devices remains.
        if method == "weights":
            return term(x, rows)
        if method == "gather":
            length = T if sharded.reads_sequences and dim == 1 else None
            return gather_and_scatter(term, x, rows, axis, dim, length)
        assert dim is not None
        halved_dim = 0 if sharded.reads_sequences else 1
        return ring_matmul(
            term, x, rows, axis, dim, halved_dim if method == "two_way_ring" else None
        )

    weight_specs = [weight.spec for weight in weights]
    axes = {axis, *(item for p in (spec, *weight_specs) for entry in p for item in axes_of(entry))}
    is_inside = bool(mesh.manual_axes)
    # JAX (0.10 to 0.12) cannot lower a nested shard_map with residuals, so both the inner and the
    # outer function are rematerialized.
    rematerialize = jax.checkpoint if is_inside else lambda function: function
    mapped = jax.shard_map(
        rematerialize(on_one_device),
        in_specs=(weight_specs, spec, row_specs),
        out_specs=spec,
        axis_names=manual_axes_for(axes),
        # Required inside a shard_map with check_vma; off elsewhere, because Pallas kernels lack VMA
        # types.
        check_vma=is_inside,
    )
    return rematerialize(mapped)([weight.array for weight in weights], x, padded)[:B, :T]


def _dim_of_tokens(sharded: ShardedLayer, axis: str, spec: PartitionSpec) -> int | None:
    """Returns the dim of x that is sharded over the axis: batch (0), time (1), or None."""
    method, name = sharded.method, sharded.name
    dims = [dim for dim, entry in enumerate(spec) if axis in axes_of(entry)]
    dim = dims[0] if dims else None
    message = f"{name} is {method!r}, but inputs and outputs are sharded as {tuple(spec)}:"
    if method != "gather" and dim is None:
        raise ConfigError(
            f"{message} none of their dims is sharded over {axis!r}. Set tensor_parallel='gather', "
            f"or also shard the batch dim over {axis!r} (residual_batch in a preset)."
        )
    others = [entry for entry in spec[1:2] if set(axes_of(entry)) - {axis}]
    is_valid = dim in (None, 0) or (
        dim == 1 and (method == "gather" or not sharded.reads_sequences)
    )
    if not is_valid or (sharded.reads_sequences and others) or spec[2] is not None:
        wrong_dim = "time" if spec[2] is None else "the last dim"
        raise ConfigError(
            f"{message} {wrong_dim} must not be sharded. Shard the batch dim over {axis!r} instead "
            "(residual_batch in a preset), or set tensor_parallel=None."
        )
    if dim is not None and axes_of(spec[dim])[-1] != axis:
        raise ConfigError(
            f"{message} {axis!r} is not the last axis of its dim. Make it the last axis, or set "
            "tensor_parallel=None."
        )
    return dim
