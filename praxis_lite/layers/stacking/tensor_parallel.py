"""Tensor parallelism with explicit collectives, enabled by a layer's setting `tensor_parallel`.

The layer and its weights do not change. Each device runs the layer with its shard of the heads or
hidden dims on the tokens that it receives. Outputs are summed over the mesh axis that splits these
dims. The compiler alone would gather and sum everything at once, without overlapping computation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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


class TensorParallelLayer(Protocol):
    """A layer with the setting "tensor_parallel"."""

    @property
    def tensor_parallel(self) -> str | None: ...


class ShardedLayer(NamedTuple):
    """An attention or feed-forward layer to run with explicit collectives.

    Attributes:
      layer: A layer with the setting `tensor_parallel`.
      function: (layer with one device's weights, inputs [B, T, D], rows) -> outputs [B, T, D].
      split: Split of inputs and outputs.
      reads_sequences: Whether a token's outputs depend on other tokens of its row.
      output: Attribute of the layer's last projection, such as "post", whose bias is added once.
      prepared: (path, weight, dim of the features, number of devices) -> the weight to split. None:
        the weight, padded with zeros until the devices divide it.
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
    def how(self) -> str:
        how = self.layer.tensor_parallel
        assert how is not None, "Otherwise the compiler splits the layer."
        return how

    @property
    def num_row_dims(self) -> int:
        """Number of leading dims that rows share with the inputs: 1 for [B], 2 for [B, T]."""
        return 1 if self.reads_sequences else 2


class WeightShard(NamedTuple):
    """A weight as an argument of the `jax.shard_map`.

    Attributes:
      path: Path in the layer.
      array: Array in the compute dtype, padded until the devices divide it.
      spec: Its spec.
      shape: Its shape without padding, except that of the features.
    """

    path: tuple
    array: jax.Array
    spec: PartitionSpec
    shape: tuple[int, ...]

    def of_device(self, block: jax.Array, half: ShardedLayer, axis: str) -> jax.Array:
        """Gathers a device's block of the weight along all dims except the features."""
        keeps_features = half.how != "weights"
        # Gather along the axis first: the last gather, which is the largest, is along another dim.
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
      half: The layer.
      axis: Mesh axis that splits the features.
      dtype: Dtype of the products.

    Raises:
      ConfigError: The split of a weight does not fit `half.how`. The message names the weight.
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
            f"only {axis!r}, because {half.name} is {half.how!r}",
            "Split another dim over the other axes, or set tensor_parallel='weights'.",
        )
        if half.prepared is not None:
            array = half.prepared(path, array, dim, mesh.shape[axis])
    # Not for biases: their gradients, sums over tokens, must be summed in the bias's dtype.
    if array.ndim > 1 and path[-1] != "b":
        array = array.astype(dtype)
    return WeightShard(path, pad_to_split(array, spec), spec, array.shape)


def _check_output(half: ShardedLayer, path: tuple, dim: int | None) -> None:
    """Checks that the layer's outputs are a sum over parts of the features.

    Raises:
      ConfigError: A weight of the output projection is neither split by features nor a bias.
    """
    if half.how == "weights" or path[0] != half.output:
        return
    output = getattr(half.layer, half.output)
    is_scaled = any(
        isinstance(node, Dense) and not node.product.adds_up()
        for _, node in nnx.compat.iter_graph(output)
    )
    why = "its product has a scale, of rounding or of DoRA, for all features" if is_scaled else (
        "the outputs must be a sum over features, plus a bias"
    )
    require(
        not is_scaled and (dim is not None or path[-1] in ("b", "lora_b")), half.name, half.how,
        f"None or 'weights' for the weight {'/'.join(map(str, path))}, because {why}",
    )


def excluded_axes() -> tuple[str, ...]:
    """Returns the mesh axes that are already manual, and those with one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return (*mesh.manual_axes, *(axis for axis, size in mesh.shape.items() if size == 1))


def pad_to_split(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Pads x with zeros until the mesh axes divide its dims."""
    return pad_to_shape(x, padded_shape(x.shape, spec, jax.sharding.get_abstract_mesh().shape))


def pad_to_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Pads the dims of x at their ends with zeros."""
    missing = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, missing) if any(map(any, missing)) else x


# By value of the setting: what is communicated along the axis.
TENSOR_PARALLEL = {
    "gather": "tokens: all tokens are gathered, and the sums of outputs scattered",
    "ring": "tokens, one shard at a time, while the device computes on the previous one",
    "two_way_ring": "as ring, with half of each shard in each direction",
    "weights": "weights: they are gathered, and tokens stay on their device",
}


def check_tensor_parallel(layer: object, setting: str | None, unable: Mapping[str, bool]) -> None:
    """Checks the setting `tensor_parallel` of a layer; see `check_way`."""
    check_way(layer, "tensor_parallel", setting, TENSOR_PARALLEL, unable, "the layer")


def tensor_parallel_axis(layer: Any, features_split: DimSplit) -> str | None:
    """Returns the mesh axis of a layer's tensor parallelism with explicit collectives, or None.

    None without a mesh, if the axis has one device, or if it is already manual.

    Args:
      layer: A layer with the setting `tensor_parallel`.
      features_split: Split of heads or hidden dims.

    Raises:
      ConfigError: The features are not split over exactly one axis.
    """
    setting, mesh = layer.tensor_parallel, jax.sharding.get_abstract_mesh()
    if setting is None or mesh.empty:
        return None
    axes = axes_of(to_partition_spec((features_split,), mesh.axis_names)[0])
    require(
        len(axes) == 1, f"The split of heads or hidden dims of {type(layer).__name__}",
        features_split, f"one mesh axis with tensor_parallel={setting!r}",
        "Set one in weight_split_dims_mapping, or set tensor_parallel=None.",
    )
    return None if mesh.shape[axes[0]] == 1 or axes[0] in mesh.manual_axes else axes[0]


def run_tensor_parallel(
    half: ShardedLayer, axis: str, x: jax.Array, rows: Mapping[str, jax.Array | None]
) -> jax.Array:
    """Returns `half.function(layer, x, rows)`, [B, T, D], with explicit collectives over `axis`.

    All axes that split x or a weight become manual. A weight that other axes split as well (fully
    sharded data parallelism) is cast to the dtype of x and gathered, and its gradient is
    reduce-scattered. Gradients of weights are summed over shards of tokens in the dtype of x. Rows,
    tokens, heads and hidden dims are padded with zeros until the devices divide them.

    Args:
      half: The layer and its function.
      axis: Result of `tensor_parallel_axis`.
      x: Inputs [B, T, D].
      rows: Arrays by name, [B or 1, ...]; [B, T] for layers that do not read sequences; or None.

    Raises:
      ConfigError: The split of x or of a weight does not fit the setting.
    """
    mesh = jax.sharding.get_abstract_mesh()
    how, (B, T, _) = half.how, x.shape
    spec = to_partition_spec(half.split or (), mesh.axis_names, rank=x.ndim)
    dim = _dim_of_tokens(half, axis, spec)
    spec = without_axes(spec, excluded_axes())
    weights, layer_of = shard_weights(half, axis, x.dtype)
    # A device has the rows of all devices along the axis, unless tokens stay on their device.
    rows_spec = (spec if how == "weights" else without_axes(spec, (axis,)))[:half.num_row_dims]
    x = pad_to_split(x, spec)
    given = {name: row for name, row in rows.items() if row is not None}
    specs = {
        name: PartitionSpec(*(
            None if n == 1 else entry for n, entry in zip(row.shape, rows_spec, strict=False)
        ))
        for name, row in given.items()
    }
    expected = x.shape[: half.num_row_dims]
    padded = {
        name: pad_to_shape(row, [
            n if n == 1 or d >= len(expected) else expected[d] for d, n in enumerate(row.shape)
        ])
        for name, row in given.items()
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
        assert dim is not None
        halved_dim = 0 if half.reads_sequences else 1
        return ring_matmul(term, x, rows, axis, dim, halved_dim if how == "two_way_ring" else None)

    weight_specs = [weight.spec for weight in weights]
    axes = {axis, *(item for p in (spec, *weight_specs) for entry in p for item in axes_of(entry))}
    is_inside = bool(mesh.manual_axes)
    # JAX (0.10 to 0.12) cannot lower a nested shard_map with residuals, so both the inner and the
    # outer function are rematerialized.
    rematerialize = jax.checkpoint if is_inside else lambda function: function
    mapped = jax.shard_map(
        rematerialize(on_a_device),
        in_specs=(weight_specs, spec, specs), out_specs=spec, axis_names=manual_axes_for(axes),
        # Required inside a shard_map that checks; elsewhere off, as Pallas kernels lack the types.
        check_vma=is_inside,
    )
    return rematerialize(mapped)([weight.array for weight in weights], x, padded)[:B, :T]


def _dim_of_tokens(half: ShardedLayer, axis: str, spec: PartitionSpec) -> int | None:
    """Returns the dim of x that the axis splits: rows (0), time (1), or None."""
    how, name = half.how, half.name
    dims = [dim for dim, entry in enumerate(spec) if axis in axes_of(entry)]
    dim = dims[0] if dims else None
    message = f"inputs and outputs split as {tuple(spec)}"
    require(
        how == "gather" or dim is not None, name, how,
        f"'gather' for {message}, because {axis!r} splits none of their dims",
        f"Or also split their rows over {axis!r}: residual_batch in a preset.",
    )
    others = [entry for entry in spec[1:2] if set(axes_of(entry)) - {axis}]
    is_valid = dim in (None, 0) or (dim == 1 and (how == "gather" or not half.reads_sequences))
    require(
        is_valid and not (half.reads_sequences and others) and spec[2] is None, name, how,
        f"None for {message}, because time must not be split" if half.reads_sequences else
        f"None for {message}, because {axis!r} must split rows or time",
        f"Or split the rows, not time, over {axis!r}: residual_batch in a preset.",
    )
    require(
        dim is None or axes_of(spec[dim])[-1] == axis, name, how,
        f"None for {message}, because {axis!r} is not the last axis of its dim",
        "Or make it the last axis.",
    )
    return dim
