"""The weights as decoding reads them: layers of a stack are arrays of their own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.models.layers_apart import LayersApart, apart_like, has_layers_apart
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.partitioner.arguments import check_tree
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.leaf_paths import path_of

PyTree = Any


class DecodingWeights:
    """Brings weights into the form that decoding reads.

    A stack whose layers are split over devices stays a stack: apart, each layer would lie on all of
    them.

    Args:
      layout: of the mdl_vars in training.
      weight_specs: of the model.
      mesh: that the arrays lie on.

    Attributes:
      layout: of the mdl_vars in decoding.
    """

    def __init__(self, layout: StateLayout, weight_specs: PyTree, mesh: Mesh):
        self._training, self._mesh = layout, mesh
        may_be_apart = {path for path, spec in spec_leaves(weight_specs) if spec.may_be_apart}
        is_apart = jax.tree.map_with_path(
            lambda keys, spec: path_of(keys) in may_be_apart and spec[0] is None, layout.specs
        )

        def apart(of_layer: Callable[[Any], Any], tree: PyTree) -> PyTree:
            return jax.tree.map(
                lambda x, leaf, goes: LayersApart([of_layer(leaf)] * x.shape[0]) if goes else leaf,
                layout.shapes, tree, is_apart,
            )

        shapes = apart(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layout.shapes)
        specs = apart(lambda spec: PartitionSpec(*spec[1:]), layout.specs)
        self.layout = StateLayout(shapes, specs, layout.axis_sizes)
        self._differs = has_layers_apart(self.layout.shapes)

    def of(self, mdl_vars: PyTree, name: str, *, donates: bool = False) -> PyTree:
        """Returns weights in this form: those of training, or in this form already.

        Weights that are no stacks are the same arrays. The others are copied, one after the other.

        Args:
          name: of the argument, for messages.
          donates: a stack is deleted once its layers are there: the memory of one stack more is
            needed at a time, and not of all.

        Raises:
          ConfigError: they are not this model's; names a leaf.
        """
        if not self._differs or has_layers_apart(mdl_vars):
            return mdl_vars
        check_tree(self._training, mdl_vars, name, self._mesh)

        def layers_of(stack: jax.Array, shardings: list[NamedSharding]) -> list[jax.Array]:
            layers = _taken_apart(*shardings)(stack)
            if donates:
                jax.block_until_ready(layers)
                stack.delete()
            return layers

        return apart_like(self.layout.shardings(self._mesh), mdl_vars, layers_of)


@functools.cache
def _taken_apart(*shardings: NamedSharding) -> Callable[[jax.Array], list[jax.Array]]:
    """Returns a compiled function from a stack to its layers, laid out as given."""
    return jax.jit(
        lambda stack: [stack[i] for i in range(len(shardings))], out_shardings=list(shardings)
    )
