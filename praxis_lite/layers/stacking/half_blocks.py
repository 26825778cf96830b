"""Half a transformer block as a device runs it by hand: with its part of the weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import require
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.padding import padded_shape
from praxis_lite.core.sharding.split_dims import SplitDims, to_partition_spec, without_axes
from praxis_lite.layers.base.dense import Dense


class HalfBlock(NamedTuple):
    """A layer run by hand: attention, or a feed-forward layer.

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
    def name(self) -> str:
        return f"{type(self.layer).__name__}.tensor_parallel"

    @property
    def how(self) -> str:
        return self.layer.tensor_parallel

    @property
    def num_row_dims(self) -> int:
        """How many dims rows share with the inputs: [B], or [B, T] where tokens are alone."""
        return 1 if self.reads_sequences else 2


class PartOfWeight(NamedTuple):
    """A weight as it enters the devices' programs.

    Attributes:
      path: in the layer.
      array: of whole features, in the dtype that it is computed with, filled up to what divides.
      spec: how the devices split it.
      shape: without filler, but for the features.
    """

    path: tuple
    array: jax.Array
    spec: PartitionSpec
    shape: tuple[int, ...]

    def of_device(self, block: jax.Array, half: HalfBlock, axis: str) -> jax.Array:
        """Returns the weights of a device's block to compute with: whole but for the features."""
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


def parts_of_weights(
    half: HalfBlock, axis: str, dtype: Any
) -> tuple[list[PartOfWeight], Callable[[list[jax.Array]], Any]]:
    """Returns a layer's weights, and what makes its layer of a device's blocks of them.

    Args:
      axis: that splits the features.
      dtype: of the products.

    Raises:
      ConfigError: a weight is not split as `half.how` needs it; names it.
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
    half: HalfBlock, axis: str, dtype: Any, path: tuple, leaf: nnx.Variable
) -> PartOfWeight:
    mesh, array = jax.sharding.get_abstract_mesh(), leaf.get_value()
    split = leaf.get_metadata().get("split_dims_mapping") or ()
    spec = without_axes(to_partition_spec(split, mesh.axis_names, rank=array.ndim), left_out())
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
    # A bias stays: the sum over tokens that is its gradient is in its own dtype.
    if array.ndim > 1 and path[-1] != "b":
        array = array.astype(dtype)
    return PartOfWeight(path, filled(array, spec), spec, array.shape)


def _check_output(half: HalfBlock, path: tuple, dim: int | None) -> None:
    """Checks that the layer's outputs are a sum of what parts of the features make of them.

    Raises:
      ConfigError: a weight at its end is neither split as they are, nor a bias.
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


def left_out() -> tuple[str, ...]:
    """Returns the mesh axes that are manual already, and those of a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return (*mesh.manual_axes, *(axis for axis, size in mesh.shape.items() if size == 1))


def filled(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns x with zeros appended to the dims that are split, so that they divide."""
    return of_shape(x, padded_shape(x.shape, spec, jax.sharding.get_abstract_mesh().shape))


def of_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns x with zeros appended."""
    missing = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, missing) if any(map(any, missing)) else x
