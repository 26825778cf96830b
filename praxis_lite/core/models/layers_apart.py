"""Stacked weights in the forms that a model takes: as separate layers, or in the host's memory."""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.memory_spaces import to_device
from praxis_lite.core.sharding.padding import unpad_tree


@functools.partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayersApart:
    """A stacked weight, taken apart along its first dims.

    A loop that takes a layer out of a stack copies it, in decoding for each token. A separate
    array, without the stacked dims, is read in place.
    """

    layers: list[Any]


def layers_of(blocks: Any, num_layers: int, num_stacked: int = 1) -> list[Any] | None:
    """Returns the layers of a module of stacks, each a module, if they are apart; else None."""
    is_apart = lambda x: isinstance(x, LayersApart)  # noqa: E731
    if not any(map(is_apart, jax.tree.leaves(blocks, is_leaf=is_apart))):
        return None

    def layer(index: int) -> Any:
        return jax.tree.map(
            # What is no weight, such as a layer's sums, is a stack that each pass makes anew.
            lambda x: x.layers[index] if is_apart(x)
            else x.reshape(-1, *x.shape[num_stacked:])[index],
            blocks, is_leaf=is_apart,
        )

    return [layer(index) for index in range(num_layers)]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["shape", "spec"]
)
@dataclasses.dataclass(frozen=True)
class HostWeight:
    """A stacked weight in the host's memory, or a layer of it.

    Attributes:
      stored: the array there, padded.
      shape, spec: of the whole stack without padding.
    """

    stored: Any
    shape: tuple[int, ...]
    spec: PartitionSpec

    def fetched(self) -> jax.Array:
        """Returns it on the device, without padding."""
        own = len(self.shape) - self.stored.ndim
        shape = jax.ShapeDtypeStruct(self.shape[own:], self.stored.dtype)
        return unpad_tree(to_device(self.stored), shape, PartitionSpec(*self.spec[own:]))


def fetched(block: Any) -> Any:
    """Returns a module whose weights are all on the device."""
    is_weight = lambda x: isinstance(x, HostWeight)  # noqa: E731
    return jax.tree.map(lambda x: x.fetched() if is_weight(x) else x, block, is_leaf=is_weight)
