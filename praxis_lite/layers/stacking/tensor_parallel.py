"""Tensor parallelism with explicit collectives: what a layer's `tensor_parallel` turns on.

The layer is the same, with the same weights. Each device runs it as if it were alone, with its part
of the heads or hidden dims, on tokens that come to it; the outputs are summed over the mesh axis
that splits these. The compiler alone gathers and sums everything at once, and computes meanwhile
nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite.errors import ConfigError, require, require_choice
from praxis_lite.sharding import SplitDims, padded_shape, to_partition_spec
from praxis_lite.sharding.logical_axes import axes_of
from praxis_lite.sharding.rings import gathered_and_scattered, in_ring
from praxis_lite.sharding.split_dims import DimSplit, without_axes

# What moves along the axis, by the name of the setting.
TENSOR_PARALLEL = {
    "gather": "tokens: all of a group are gathered, and the outputs' sums scattered",
    "ring": "tokens, a piece at a time, while the device computes on the one before",
    "two_way_ring": "as ring, half of each piece each way round",
    "weights": "the weights: they are gathered, and a device keeps its tokens",
}


class HalfBlock(NamedTuple):
    """What is run by hand: attention, or a feed-forward layer.

    Attributes:
      layer: with the setting `tensor_parallel`.
      function: of the layer as a device has it, inputs [B, T, D] and rows; gives outputs [B, T, D].
      split: of inputs and outputs.
      reads_sequences: True: a token's outputs depend on its row's others.
      output: the layer's attribute that makes its outputs, "post"; its bias is added once.
      prepared: from a weight's path, value, the dim with the features and the number of devices to
        what the devices split; None: the weight, zeros appended to what does not divide.
    """

    layer: nnx.Module
    function: Callable[[Any, jax.Array, Mapping[str, jax.Array]], jax.Array]
    split: SplitDims
    reads_sequences: bool
    output: str
    prepared: Callable[[tuple, jax.Array, int, int], jax.Array] | None = None

    @property
    def num_row_dims(self) -> int:
        """How many dims rows share with the inputs: [B], or [B, T] where tokens are alone."""
        return 1 if self.reads_sequences else 2


def check_tensor_parallel(layer: object, setting: str | None, unable: Mapping[str, bool]) -> None:
    """Checks the setting of a layer.

    Args:
      unable: settings of the layer that do not go with it, by name: whether they are in use.

    Raises:
      ConfigError: there is no such way, or a setting that does not go with it is in use.
    """
    if setting is None:
        return
    name = type(layer).__name__
    require_choice(f"{name}.tensor_parallel", setting, TENSOR_PARALLEL)
    used = [other for other, is_used in unable.items() if is_used]
    if used:
        raise ConfigError(
            f"{name}.tensor_parallel is {setting!r}, which cannot do {' or '.join(used)}. Leave "
            "that out, or set tensor_parallel=None: the compiler then splits the layer."
        )


def axis_by_hand(layer: Any, features_split: DimSplit) -> str | None:
    """Returns the mesh axis along which a layer is run by hand, or None if it is not.

    It is not where no mesh is set, where the axis has one device, and inside a `jax.shard_map` that
    has taken the axis already.

    Args:
      layer: with the setting `tensor_parallel`.
      features_split: of the dim that tensor parallelism splits, heads or hidden dims.

    Raises:
      ConfigError: the features are split over no axis, or over several.
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


def by_hand(
    half: HalfBlock, axis: str, x: jax.Array, rows: Mapping[str, jax.Array | None]
) -> jax.Array:
    """Returns `half.function(layer, x, rows)`, [B, T, D], summed by hand over a mesh axis.

    All axes that the compiler has are taken: a weight that is split over others, too (fully sharded
    data parallelism), is cast to the dtype of x, gathered, and its gradient reduce-scattered.
    Weights' gradients of several pieces are added in the dtype of x. Filler rows, tokens, heads and
    hidden dims, of zeros, make divide what does not.

    Args:
      half: the layer, and what it is called with.
      axis: of `axis_by_hand`.
      x: [B, T, D].
      rows: by name [B or 1, ...], or [B, T] of a layer that does not read sequences; or None.

    Raises:
      ConfigError: x or a weight is not split as the setting needs it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    how, (B, T, _) = half.layer.tensor_parallel, x.shape
    spec = to_partition_spec(half.split or (), mesh.axis_names, rank=x.ndim)
    dim = _dim_of_tokens(half, axis, spec)
    spec = without_axes(spec, mesh.manual_axes)
    weights = _Weights.of(half, axis)
    # A device has the rows of its group, all devices along the axis, unless it keeps its tokens.
    rows_spec = (spec if how == "weights" else without_axes(spec, (axis,)))[:half.num_row_dims]
    x = _filled(x, spec)
    rows = {name: row for name, row in rows.items() if row is not None}
    specs = {
        name: PartitionSpec(*(
            None if n == 1 else entry for n, entry in zip(row.shape, rows_spec, strict=False)
        ))
        for name, row in rows.items()
    }
    filled = x.shape[: half.num_row_dims]
    rows = {
        name: _of_shape(row, [
            n if n == 1 or d >= len(filled) else filled[d] for d, n in enumerate(row.shape)
        ])
        for name, row in rows.items()
    }

    def on_a_device(
        blocks: list[jax.Array], x: jax.Array, rows: Mapping[str, jax.Array]
    ) -> jax.Array:
        layer = weights.layer(blocks)

        def term(x: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
            return half.function(layer, x, rows)

        if how == "weights":
            return term(x, rows)
        if how == "gather":
            length = T if half.reads_sequences and dim == 1 else None
            return gathered_and_scattered(term, x, rows, axis, dim, length)
        halved_dim = 0 if half.reads_sequences else 1
        return in_ring(term, x, rows, axis, dim, halved_dim if how == "two_way_ring" else None)

    is_inside = bool(mesh.manual_axes)
    if is_inside:
        # JAX (0.10 to 0.12) cannot lower the gradient of a shard_map inside another if it keeps
        # values of the forward pass: they are computed again.
        on_a_device = jax.checkpoint(on_a_device)
    mapped = jax.shard_map(
        on_a_device,
        in_specs=(weights.specs, spec, specs),
        out_specs=spec,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        # Inside one that checks, it must; elsewhere kernels of Pallas do not say what varies.
        check_vma=is_inside,
    )
    return mapped(weights.values(x.dtype), x, rows)[:B, :T]


def _dim_of_tokens(half: HalfBlock, axis: str, spec: PartitionSpec) -> int | None:
    """Returns the dim of x that the axis splits, rows (0) or time (1), or None."""
    how, name = half.layer.tensor_parallel, f"{type(half.layer).__name__}.tensor_parallel"
    dims = [dim for dim, entry in enumerate(spec) if axis in axes_of(entry)]
    dim = dims[0] if dims else None
    said = f"inputs and outputs that split as {tuple(spec)}"
    require(
        how == "gather" or dim is not None, name, how,
        f"'gather' for {said}, of which {axis!r} splits nothing",
        f"Or split their rows over {axis!r} too: residual_batch in a preset.",
    )
    others = [entry for entry in spec[1:2] if set(axes_of(entry)) - {axis}]
    is_right = dim in (None, 0) or (dim == 1 and (how == "gather" or not half.reads_sequences))
    require(
        is_right and not (half.reads_sequences and others) and spec[2] is None, name, how,
        f"None for {said}: time is to be whole here" if half.reads_sequences else
        f"None for {said}: {axis!r} is to split rows or time",
        f"Or split the rows over {axis!r}, not time: residual_batch in a preset.",
    )
    require(
        dim is None or axes_of(spec[dim])[-1] == axis, name, how,
        f"None for {said}, where {axis!r} is not the last axis of its dim",
        "Or name it last.",
    )
    return dim


class _Weights(NamedTuple):
    """The weights of a layer, as they enter the devices' programs.

    Attributes:
      graphdef, leaves: the layer's structure, and its variables by path.
      arrays, specs: whole, with as many features as the devices divide; and how they split.
      gathered: from an axis' splits of a device's block to what the device computes with.
    """

    graphdef: Any
    leaves: list[tuple[tuple, nnx.Variable]]
    arrays: list[jax.Array]
    specs: list[PartitionSpec]
    half: HalfBlock
    axis: str

    @classmethod
    def of(cls, half: HalfBlock, axis: str) -> "_Weights":
        mesh = jax.sharding.get_abstract_mesh()
        graphdef, state = nnx.split(half.layer)
        leaves, arrays, specs = list(nnx.to_flat_state(state)), [], []
        for path, leaf in leaves:
            array = leaf.get_value()
            split = leaf.get_metadata().get("split_dims_mapping") or ()
            spec = to_partition_spec(split, mesh.axis_names, rank=array.ndim)
            spec = without_axes(spec, mesh.manual_axes)
            dim = next((d for d, entry in enumerate(spec) if axis in axes_of(entry)), None)
            _check_output(half, path, dim)
            if dim is not None and half.layer.tensor_parallel != "weights":
                name = "/".join(map(str, path))
                require(
                    axes_of(spec[dim]) == (axis,), f"The split of dim {dim} of {name}", spec[dim],
                    f"{axis!r} alone, for {type(half.layer).__name__} has tensor_parallel="
                    f"{half.layer.tensor_parallel!r}",
                    "Split another dim over the other axes, or set tensor_parallel='weights'.",
                )
                if half.prepared is not None:
                    array = half.prepared(path, array, dim, mesh.shape[axis])
            arrays.append(array)
            specs.append(spec)
        return cls(graphdef, leaves, arrays, specs, half, axis)

    def values(self, dtype: Any) -> list[jax.Array]:
        """Returns them filled up to what divides, products' factors in `dtype`."""

        def value(path: tuple, array: jax.Array, spec: PartitionSpec) -> jax.Array:
            # A bias stays: the sum over tokens that is its gradient is in its own dtype.
            is_factor = array.ndim > 1 and path[-1] != "b"
            return _filled(array.astype(dtype) if is_factor else array, spec)

        return [
            value(path, array, spec)
            for (path, _), array, spec in zip(self.leaves, self.arrays, self.specs, strict=True)
        ]

    def layer(self, blocks: list[jax.Array]) -> Any:
        """Returns the layer with a device's part of the features."""
        keeps_features = self.half.layer.tensor_parallel != "weights"
        flat = []
        for (path, leaf), block, array, spec in zip(
            self.leaves, blocks, self.arrays, self.specs, strict=True
        ):
            # Along the axis first: the last and largest gather then is of another dim.
            for dim in sorted(range(len(spec)), key=lambda d, s=spec: self.axis not in axes_of(s[d])):
                axes = axes_of(spec[dim])
                if axes and not (keeps_features and self.axis in axes):
                    block = jax.lax.all_gather(block, axes, axis=dim, tiled=True)
                    block = jax.lax.slice_in_dim(block, 0, array.shape[dim], axis=dim)
            if keeps_features and path[0] == self.half.output and path[-1] == "b":
                block = jnp.where(jax.lax.axis_index(self.axis) == 0, block, 0)
            flat.append((path, nnx.Param(block)))
        return nnx.merge(self.graphdef, nnx.from_flat_state(flat))


def _check_output(half: HalfBlock, path: tuple, dim: int | None) -> None:
    """Checks that the layer's outputs are a sum of what parts of the features make of them.

    Raises:
      ConfigError: a weight at its end is neither split as they are, nor a bias.
    """
    how = half.layer.tensor_parallel
    if how == "weights" or path[0] != half.output:
        return
    output = getattr(half.layer, half.output)
    is_quantized = any(hasattr(node, "quantization") for _, node in nnx.iter_graph(output))
    require(
        not is_quantized and (dim is not None or path[-1] in ("b", "lora_b")),
        f"{type(half.layer).__name__}.tensor_parallel", how,
        f"None with the weight {'/'.join(map(str, path))} as it is"
        + (", rounded: its scale is that of all features" if is_quantized else
           ": outputs are to be a sum over features, and a bias"),
        "Or set tensor_parallel='weights'.",
    )


def _filled(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns x with zeros appended to the dims that are split, so that they divide."""
    return _of_shape(x, padded_shape(x.shape, spec, jax.sharding.get_abstract_mesh().shape))


def _of_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    missing = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, missing) if any(map(any, missing)) else x
