"""Tensor parallelism with explicit collectives: a layer's setting `tensor_parallel`.

Layer and weights are the same. Each device runs the layer with its part of the heads or hidden dims
on the tokens that it receives; the outputs are summed over the mesh axis that splits these dims.
The compiler alone would gather and sum everything at once, without overlapping computation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite.core.collectives.vmapped_axes import manual_axes_for
from praxis_lite.core.errors import require
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.padding import padded_shape
from praxis_lite.core.sharding.split_dims import (
    DimSplit,
    SplitDims,
    to_partition_spec,
    without_axes,
)
from praxis_lite.layers.base.calls import check_way
from praxis_lite.layers.base.dense import Dense
from praxis_lite.layers.stacking.collective_matmul import gather_and_scatter, ring_matmul


class ShardedLayer(NamedTuple):
    """An attention or feed-forward layer that runs with explicit collectives.

    Attributes:
      layer: has the setting `tensor_parallel`.
      function: (layer with one device's weights, inputs [B, T, D], rows) -> outputs [B, T, D].
      split: of inputs and outputs.
      reads_sequences: whether a token's outputs depend on other tokens of its row.
      output: the attribute of the layer's last projection, such as "post"; its bias is added once.
      prepared: (path, weight, dim of the features, number of devices) -> the weight to split. None:
        the weight, padded with zeros until it divides.
    """

    layer: nnx.Module
    function: Callable[[Any, jax.Array, Mapping[str, jax.Array]], jax.Array]
    split: SplitDims
    reads_sequences: bool
    output: str
    prepared: Callable[[tuple, jax.Array, int, int], jax.Array] | None = None

    @property
    def name(self) -> str:
        return f"{type(self.layer).__name__}.tensor_parallel"

    @property
    def how(self) -> str:
        return self.layer.tensor_parallel

    @property
    def num_row_dims(self) -> int:
        """Number of leading dims that rows share with the inputs: [B], or [B, T]."""
        return 1 if self.reads_sequences else 2


class WeightShard(NamedTuple):
    """A weight as an argument of the `jax.shard_map`.

    Attributes:
      path: in the layer.
      array: in the compute dtype, padded until the devices divide it.
      spec: how the devices split it.
      shape: without padding, except that of the features.
    """

    path: tuple
    array: jax.Array
    spec: PartitionSpec
    shape: tuple[int, ...]

    def of_device(self, block: jax.Array, half: ShardedLayer, axis: str) -> jax.Array:
        """Gathers a device's block of the weight, except along the features."""
        keeps_features = half.how != "weights"
        # Along the axis first: the last and largest gather then is of another dim.
        dims = sorted(range(len(self.spec)), key=lambda dim: axis not in axes_of(self.spec[dim]))
        for dim in dims:
            axes = axes_of(self.spec[dim])
            if axes and not (keeps_features and axis in axes):
                block = jax.lax.all_gather(block, axes, axis=dim, tiled=True)
                block = jax.lax.slice_in_dim(block, 0, self.shape[dim], axis=dim)
        if keeps_features and self.path[0] == half.output and self.path[-1] == "b":
            return jnp.where(jax.lax.axis_index(axis) == 0, block, 0)
        return block


def shard_weights(
    half: ShardedLayer, axis: str, dtype: Any
) -> tuple[list[WeightShard], Callable[[list[jax.Array]], Any]]:
    """Returns a layer's weights, and a function from a device's blocks of them to its layer.

    Args:
      axis: the mesh axis that splits the features.
      dtype: of the products.

    Raises:
      ConfigError: a weight's split does not fit `half.how`; names the weight.
    """
    graphdef, state = nnx.compat.split(half.layer)
    leaves = list(nnx.to_flat_state(state))
    parts = [_part(half, axis, dtype, path, leaf) for path, leaf in leaves]

    def layer(blocks: list[jax.Array]) -> Any:
        flat = [
            (part.path, nnx.Param(part.of_device(block, half, axis)))
            for part, block in zip(parts, blocks, strict=True)
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(flat))

    return parts, layer


def _part(
    half: ShardedLayer, axis: str, dtype: Any, path: tuple, leaf: nnx.Variable
) -> WeightShard:
    mesh, array = jax.sharding.get_abstract_mesh(), leaf.get_value()
    split = leaf.get_metadata().get("split_dims_mapping") or ()
    spec = without_axes(to_partition_spec(split, mesh.axis_names, rank=array.ndim), excluded_axes())
    dim = next((d for d, entry in enumerate(spec) if axis in axes_of(entry)), None)
    _check_output(half, path, dim)
    if dim is not None and half.how != "weights":
        require(
            axes_of(spec[dim]) == (axis,),
            f"The split of dim {dim} of {'/'.join(map(str, path))}", spec[dim],
            f"{axis!r} alone, for {half.name} is {half.how!r}",
            "Split another dim over the other axes, or set tensor_parallel='weights'.",
        )
        if half.prepared is not None:
            array = half.prepared(path, array, dim, mesh.shape[axis])
    # Not a bias: its gradient, a sum over tokens, is summed in the bias's dtype.
    if array.ndim > 1 and path[-1] != "b":
        array = array.astype(dtype)
    return WeightShard(path, pad_to_split(array, spec), spec, array.shape)


def _check_output(half: ShardedLayer, path: tuple, dim: int | None) -> None:
    """Checks that the layer's outputs are a sum over parts of the features.

    Raises:
      ConfigError: a weight of the output projection is neither split by features nor a bias.
    """
    if half.how == "weights" or path[0] != half.output:
        return
    output = getattr(half.layer, half.output)
    is_scaled = any(
        isinstance(node, Dense) and not node.product.adds_up()
        for _, node in nnx.compat.iter_graph(output)
    )
    why = "its product has a scale, of rounding or of DoRA, for all features" if is_scaled else (
        "the outputs are to be a sum over features, and a bias"
    )
    require(
        not is_scaled and (dim is not None or path[-1] in ("b", "lora_b")), half.name, half.how,
        f"None or 'weights' with the weight {'/'.join(map(str, path))} as it is: {why}",
    )


def excluded_axes() -> tuple[str, ...]:
    """Returns the mesh axes that are manual already, and those with a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return (*mesh.manual_axes, *(axis for axis, size in mesh.shape.items() if size == 1))


def pad_to_split(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Pads x with zeros until its split dims divide."""
    return pad_to_shape(x, padded_shape(x.shape, spec, jax.sharding.get_abstract_mesh().shape))


def pad_to_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Pads x with zeros at the end of its dims."""
    missing = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, missing) if any(map(any, missing)) else x


# What moves along the axis, by the name of the setting.
TENSOR_PARALLEL = {
    "gather": "tokens: all of a group are gathered, and the outputs' sums scattered",
    "ring": "tokens, a piece at a time, while the device computes on the one before",
    "two_way_ring": "as ring, half of each piece each way round",
    "weights": "the weights: they are gathered, and a device keeps its tokens",
}


def check_tensor_parallel(layer: object, setting: str | None, unable: Mapping[str, bool]) -> None:
    """Checks the setting `tensor_parallel` of a layer, as `check_way`, with its errors."""
    check_way(layer, "tensor_parallel", setting, TENSOR_PARALLEL, unable, "the layer")


def tensor_parallel_axis(layer: Any, features_split: DimSplit) -> str | None:
    """Returns the mesh axis of a layer's tensor parallelism with explicit collectives, or None.

    None without a mesh, if the axis has one device, and inside a `jax.shard_map` over the axis.

    Args:
      layer: has the setting `tensor_parallel`.
      features_split: the split of heads or hidden dims.

    Raises:
      ConfigError: the features are not split over exactly one axis.
    """
    setting, mesh = layer.tensor_parallel, jax.sharding.get_abstract_mesh()
    if setting is None or mesh.empty:
        return None
    axes = axes_of(to_partition_spec((features_split,), mesh.axis_names)[0])
    require(
        len(axes) == 1, f"The split of heads or hidden dims of {type(layer).__name__}",
        features_split, f"one mesh axis with tensor_parallel={setting!r}",
        "Name one in weight_split_dims_mapping, or set tensor_parallel=None.",
    )
    return None if mesh.shape[axes[0]] == 1 or axes[0] in mesh.manual_axes else axes[0]


def run_tensor_parallel(
    half: ShardedLayer, axis: str, x: jax.Array, rows: Mapping[str, jax.Array | None]
) -> jax.Array:
    """Returns `half.function(layer, x, rows)`, [B, T, D], with explicit collectives over `axis`.

    All axes that split x or a weight become manual: a weight that other axes split too (fully
    sharded data parallelism) is cast to the dtype of x and gathered, and its gradient is
    reduce-scattered. Gradients of weights are added over pieces in the dtype of x. Rows, tokens,
    heads and hidden dims are padded with zeros until they divide.

    Args:
      half: the layer, and what it is called with.
      axis: the result of `tensor_parallel_axis`.
      x: [B, T, D].
      rows: by name [B or 1, ...], or [B, T] of a layer that does not read sequences; or None.

    Raises:
      ConfigError: the split of x or of a weight does not fit the setting.
    """
    mesh = jax.sharding.get_abstract_mesh()
    how, (B, T, _) = half.how, x.shape
    spec = to_partition_spec(half.split or (), mesh.axis_names, rank=x.ndim)
    dim = _dim_of_tokens(half, axis, spec)
    spec = without_axes(spec, excluded_axes())
    weights, layer_of = shard_weights(half, axis, x.dtype)
    # A device has the rows of all devices along the axis, unless it keeps its tokens.
    rows_spec = (spec if how == "weights" else without_axes(spec, (axis,)))[:half.num_row_dims]
    x = pad_to_split(x, spec)
    rows = {name: row for name, row in rows.items() if row is not None}
    specs = {
        name: PartitionSpec(*(
            None if n == 1 else entry for n, entry in zip(row.shape, rows_spec, strict=False)
        ))
        for name, row in rows.items()
    }
    expected = x.shape[: half.num_row_dims]
    rows = {
        name: pad_to_shape(row, [
            n if n == 1 or d >= len(expected) else expected[d] for d, n in enumerate(row.shape)
        ])
        for name, row in rows.items()
    }

    def on_a_device(
        blocks: list[jax.Array], x: jax.Array, rows: Mapping[str, jax.Array]
    ) -> jax.Array:
        layer = layer_of(blocks)

        def term(x: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
            return half.function(layer, x, rows)

        if how == "weights":
            return term(x, rows)
        if how == "gather":
            length = T if half.reads_sequences and dim == 1 else None
            return gather_and_scatter(term, x, rows, axis, dim, length)
        halved_dim = 0 if half.reads_sequences else 1
        return ring_matmul(term, x, rows, axis, dim, halved_dim if how == "two_way_ring" else None)

    weight_specs = [weight.spec for weight in weights]
    axes = {axis, *(item for p in (spec, *weight_specs) for entry in p for item in axes_of(entry))}
    is_inside = bool(mesh.manual_axes)
    # JAX (0.10 to 0.12) cannot lower a nested shard_map with residuals: recompute inside and
    # around.
    computed_again = jax.checkpoint if is_inside else lambda function: function
    mapped = jax.shard_map(
        computed_again(on_a_device),
        in_specs=(weight_specs, spec, specs), out_specs=spec, axis_names=manual_axes_for(axes),
        # Required inside a shard_map that checks; elsewhere Pallas kernels lack the types.
        check_vma=is_inside,
    )
    return computed_again(mapped)([weight.array for weight in weights], x, rows)[:B, :T]


def _dim_of_tokens(half: ShardedLayer, axis: str, spec: PartitionSpec) -> int | None:
    """Returns the dim of x that the axis splits, rows (0) or time (1), or None."""
    how, name = half.how, half.name
    dims = [dim for dim, entry in enumerate(spec) if axis in axes_of(entry)]
    dim = dims[0] if dims else None
    message = f"inputs and outputs that split as {tuple(spec)}"
    require(
        how == "gather" or dim is not None, name, how,
        f"'gather' for {message}, of which {axis!r} splits nothing",
        f"Or split their rows over {axis!r} too: residual_batch in a preset.",
    )
    others = [entry for entry in spec[1:2] if set(axes_of(entry)) - {axis}]
    is_right = dim in (None, 0) or (dim == 1 and (how == "gather" or not half.reads_sequences))
    require(
        is_right and not (half.reads_sequences and others) and spec[2] is None, name, how,
        f"None for {message}: time is to be whole here" if half.reads_sequences else
        f"None for {message}: {axis!r} is to split rows or time",
        f"Or split the rows over {axis!r}, not time: residual_batch in a preset.",
    )
    require(
        dim is None or axes_of(spec[dim])[-1] == axis, name, how,
        f"None for {message}, where {axis!r} is not the last axis of its dim",
        "Or name it last.",
    )
    return dim
