"""Defines variables for auxiliary losses and metrics, and reads or assigns layers' variables."""

from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import require
from praxis_lite.core.sharding.memory_spaces import HOST
from praxis_lite.core.sharding.split_dims import DimSplit

__all__ = ("AuxLoss", "Summary", "aux_loss", "intermediates", "rebuilt")

Tree = TypeVar("Tree")


class AuxLoss(nnx.Intermediate):
    """A scalar that a forward pass adds to the training loss, such as a load-balancing loss.

    Intermediates are created as zeros in the constructor and set by each pass. They are neither
    trained nor stored in checkpoints; every step starts from zeros.
    """


class Summary(nnx.Intermediate):
    """A scalar metric from a forward pass, such as the fraction of tokens that a router dropped."""


def intermediates(module: nnx.Module, kind: type[nnx.Variable]) -> dict[str, jax.Array]:
    """Returns the values of all variables of a type, keyed by path.

    Values of stacked layers have a leading dim.
    """
    return {
        "/".join(map(str, path)): node.get_value()
        for path, node in nnx.compat.iter_graph(module)
        if isinstance(node, kind)
    }


def aux_loss(module: nnx.Module) -> jax.Array | None:
    """Returns the sum of the AuxLoss variables of a module, or None if there are none."""
    losses = intermediates(module, AuxLoss).values()
    return sum((jnp.sum(x) for x in losses), start=jnp.zeros(())) if losses else None


def assigned_values(module: nnx.Module) -> dict[tuple, jax.Array]:
    """Returns the values of all variables that a forward pass may assign, keyed by path.

    These are all variables except weights. Assignments inside `jax.lax.scan` or `jax.checkpoint`
    are lost unless the values are returned. A layer that calls other layers inside such a body must
    return these values from the body and pass them to `assign`.
    """
    return {
        path: node.get_value()
        for path, node in nnx.compat.iter_graph(module)
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)
    }


def assign(module: nnx.Module, values: dict[tuple, jax.Array]) -> None:
    """Assigns values from `assigned_values` to the variables of `module`."""
    for path, node in nnx.compat.iter_graph(module):
        if path in values:
            node.set_value(values[path])


def rebuilt(module: Tree) -> Tree:
    """Returns a copy of a module whose variables can be assigned in the body of a scan or loop.

    Flax rejects assignments to a module from an outer trace. Assignments to the copy are local.
    """
    return jax.tree.map(lambda x: x, module)


def variables(module: nnx.Module) -> Iterator[nnx.Variable]:
    """Yields each variable of a module once."""
    for _, node in nnx.compat.iter_graph(module):
        if isinstance(node, nnx.Variable):
            yield node


def put_on_host(module: nnx.Module) -> None:
    """Declares that the matrices in a stack of layers are stored in host memory.

    Vectors stay on the device, because they are small and each would need a separate transfer.
    """
    for variable in variables(module):
        if isinstance(variable, nnx.Param) and variable.ndim - num_stacked_dims(variable) > 1:
            variable.set_metadata(memory_kind=HOST)


def num_stacked_dims(variable: nnx.Variable) -> int:
    """Returns the number of leading dims along which a weight stacks layers.

    Dims that `nnx.vmap` adds count as well.
    """
    metadata = variable.get_metadata()
    if "dim_names" in metadata:  # Created by a BaseLayer, with a name for each unstacked dim.
        return variable.ndim - len(metadata["dim_names"])
    return len(metadata.get("stack_split_dims_mapping", ()))


def abstract_block(blocks: Tree, num_dims: int = 1) -> Tree:
    """Returns one block of a stack, with abstract arrays.

    Args:
      blocks: Tree of stacked arrays.
      num_dims: Number of stacked dims.
    """
    return jax.eval_shape(lambda blocks: jax.tree.map(lambda x: x[(0,) * num_dims], blocks), blocks)


def stacked(
    module: nnx.Module, stack_split: DimSplit, *, num_unstackable_dims: int = 0
) -> nnx.Module:
    """Declares the leading dim that `jax.vmap` has added to the arrays of `module`.

    Args:
      module: The stack of layers.
      stack_split: Sharding of the stacked dim.
      num_unstackable_dims: Number of stacked dims for which decoding may pass `UnstackedLayers`.

    Returns:
      `module`.

    Raises:
      ConfigError: The dim is sharded, but an inner Repeat stores weights in host memory.
    """
    for variable in variables(module):
        require(
            stack_split is None or "memory_kind" not in variable.get_metadata(),
            "Repeat.offload_weights",
            True,
            f"False in a stack that is sharded over {stack_split!r}, such as a Pipeline",
        )
        inner = variable.get_metadata().get("stack_split_dims_mapping", ())
        variable.set_metadata(
            stack_split_dims_mapping=(stack_split, *inner),
            num_unstackable_dims=num_unstackable_dims,
        )
    return module
