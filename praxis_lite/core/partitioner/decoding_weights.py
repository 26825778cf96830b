"""Converts weights to the decoding format: unstacks layers, and applies task conversions."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.models.stacked_weights import UnstackedLayers
from praxis_lite.core.partitioner.arguments import check_tree
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.leaf_paths import path_of
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.memory_spaces import is_on_host, to_device

PyTree = Any
# Converts a layer's weight to the array that decoding stores, or to several arrays of equal rank.
Stored = Callable[[jax.Array], PyTree]


@dataclasses.dataclass(frozen=True)
class _Form:
    """Converts a weight to its decoding format.

    Attributes:
      num_unstacked_dims: Number of leading stacked dims along which the weight is unstacked.
      stored: Converts a layer's weight; None to keep the weight unchanged.
    """

    num_unstacked_dims: int
    stored: Stored | None

    def convert(self, x: jax.Array) -> PyTree:
        num_dims = self.num_unstacked_dims
        layers = x.reshape(-1, *x.shape[num_dims:]) if num_dims else [x]
        stored = [layer if self.stored is None else self.stored(layer) for layer in layers]
        return UnstackedLayers(stored) if num_dims else stored[0]


class DecodingWeights:
    """Converts weights to the decoding format.

    A stack whose layers are split over devices stays stacked, because each unstacked layer would be
    replicated on all devices.

    Args:
      layout: Layout of the mdl_vars in training.
      weight_specs: Specs of the model's weights.
      mesh: Mesh of the arrays.
      stored: Maps a weight's path to its conversion; see `Task.stored_for_decoding`.

    Attributes:
      layout: Layout of the mdl_vars in decoding.
    """

    def __init__(
        self, layout: StateLayout, weight_specs: PyTree, mesh: Mesh, stored: Mapping[str, Stored]
    ):
        self._training, self._mesh = layout, mesh
        num_unstackable = {
            path: spec.num_unstackable_dims for path, spec in spec_leaves(weight_specs)
        }

        def form(keys: Any, spec: PartitionSpec) -> _Form:
            path = path_of(keys)
            num = num_unstackable.get(path, 0)
            is_split = any(layout.axis_sizes[x] > 1 for entry in spec[:num] for x in axes_of(entry))
            return _Form(0 if is_split else num, stored.get(path))

        def specs(x: jax.ShapeDtypeStruct, spec: PartitionSpec, form: _Form) -> PyTree:
            # Use a distinct size per dim to detect where the conversion moves each dim of the
            # weight.
            sizes = {3 + i: entry for i, entry in enumerate(spec[form.num_unstacked_dims :])}
            like = jax.ShapeDtypeStruct((*x.shape[: form.num_unstacked_dims], *sizes), x.dtype)
            return jax.tree.map(
                lambda stored: PartitionSpec(*map(sizes.get, stored.shape)),
                jax.eval_shape(form.convert, like),
            )

        self._forms = jax.tree.map_with_path(form, layout.specs)
        shapes = jax.eval_shape(self.convert_arrays, layout.shapes)
        specs = jax.tree.map(specs, layout.shapes, layout.specs, self._forms)
        self.layout = StateLayout(shapes, specs, layout.axis_sizes)

    def convert_arrays(self, tree: PyTree) -> PyTree:
        """Converts a tree of arrays of any shape and sharding; can be traced."""
        return jax.tree.map(lambda x, form: form.convert(x), tree, self._forms)

    def convert(self, mdl_vars: PyTree, name: str, *, donates: bool = False) -> PyTree:
        """Converts training weights, unless they are already in the decoding format.

        Arrays that need no conversion are returned without a copy. The others are converted one at
        a time.

        Args:
          mdl_vars: Weights in the training or decoding format.
          name: Name of the argument, for messages.
          donates: Whether to delete each weight after its conversion, so that at most one weight is
            in memory twice.

        Raises:
          ConfigError: `mdl_vars` are not this model's weights; the message names a leaf.
        """
        if self.layout.is_of(mdl_vars):
            return mdl_vars
        check_tree(self._training, mdl_vars, name, self._mesh)

        def in_form(x: jax.Array, form: _Form, shardings: PyTree) -> PyTree:
            if not form.num_unstacked_dims and form.stored is None and not is_on_host(x):
                return x
            leaves, treedef = jax.tree.flatten(shardings)
            new = _in_form(form, treedef, *leaves)(x)
            # Free each array before the next one is converted.
            if donates:
                jax.block_until_ready(new)
                x.delete()
            return new

        return jax.tree.map(in_form, mdl_vars, self._forms, self.layout.shardings(self._mesh))


@functools.cache
def _in_form(form: _Form, treedef: Any, *shardings: NamedSharding) -> Callable[[jax.Array], PyTree]:
    """Returns a compiled function that converts a weight and places it with the given shardings."""
    shardings_tree = jax.tree.unflatten(treedef, shardings)
    return jax.jit(lambda x: form.convert(to_device(x)), out_shardings=shardings_tree)
