"""Alternative forms of stacked weights that models accept: unstacked, or in host memory."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.memory_spaces import to_device
from praxis_lite.core.sharding.padding import unpad_tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnstackedLayers:
    """A stacked weight as one array per layer, without the stacked dims.

    In a loop that indexes into a stack, the weight of each layer is copied. In decoding, these
    copies would be made for every token. Separate arrays are read in place.
    """

    layers: list[Any]


def unstacked_layers(blocks: Any, num_layers: int, num_stacked: int = 1) -> list[Any] | None:
    """Returns a module per layer if the weights of `blocks` are `UnstackedLayers`, else None.

    Args:
      blocks: A module whose arrays are stacks of layers.
      num_layers: Number of layers.
      num_stacked: Number of leading layer dims in arrays that are not `UnstackedLayers`.
    """

    def is_unstacked(x: Any) -> bool:
        return isinstance(x, UnstackedLayers)

    if not any(map(is_unstacked, jax.tree.leaves(blocks, is_leaf=is_unstacked))):
        return None

    def layer(index: int) -> Any:
        return jax.tree.map(
            # Arrays that are not weights, such as statistics, are always stacked.
            lambda x: (
                x.layers[index] if is_unstacked(x) else x.reshape(-1, *x.shape[num_stacked:])[index]
            ),
            blocks,
            is_leaf=is_unstacked,
        )

    return [layer(index) for index in range(num_layers)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostWeight:
    """A stacked weight in host memory, or one layer of it.

    Attributes:
      stored: Padded array in host memory.
      shape: Logical shape of the entire stack.
      spec: PartitionSpec of the entire stack.
    """

    stored: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    spec: PartitionSpec = dataclasses.field(metadata={"static": True})

    def to_device(self) -> jax.Array:
        """Returns the unpadded weight in device memory."""
        num_indexed = len(self.shape) - self.stored.ndim  # Stacked dims that a scan has removed.
        shape = jax.ShapeDtypeStruct(self.shape[num_indexed:], self.stored.dtype)
        spec = PartitionSpec(*self.spec[num_indexed:])
        unpadded: jax.Array = unpad_tree(to_device(self.stored), shape, spec)
        return unpadded


def weights_to_device(block: Any) -> Any:
    """Returns a module with its `HostWeight`s replaced by arrays in device memory."""

    def is_weight(x: Any) -> bool:
        return isinstance(x, HostWeight)

    return jax.tree.map(lambda x: x.to_device() if is_weight(x) else x, block, is_leaf=is_weight)
