"""The state of training, and its layout: shapes, specs and padded shapes as an object."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.learner.bound_learner import BoundLearner
from praxis_lite.core.learner.slots import slot_specs
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.padding import pad_tree, padded_shape, unpad_tree
from praxis_lite.core.sharding.weight_sharding import decide_shardings
from praxis_lite.core.task import Task

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training carries from step to step; Pax's fields.

    Attributes:
      step: int32 scalar: steps made, skipped ones included.
      mdl_vars: `{"params": ..., "non_trainable": ...}`, nested dicts of arrays.
      opt_states: of `Learner.init`: counts, `"slots"` by group, what else is set.
    """

    step: Any
    mdl_vars: Any
    opt_states: Any


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """An array's layout: its place in the tree and on the mesh, and the reason of it."""

    path: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    num_shards: int
    declared_by: str = ""

    @property
    def bytes_per_device(self) -> int:
        return math.prod(self.padded_shape) * self.dtype.itemsize // self.num_shards

    @property
    def padding_share(self) -> float:
        """The share of the stored elements that are padding."""
        padded = math.prod(self.padded_shape)
        return 1.0 - math.prod(self.shape) / padded if padded else 0.0


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The place of each leaf of a tree: pads, slices, places and reports.

    Attributes:
      shapes: tree of ShapeDtypeStruct: the logical, unpadded shapes.
      specs: the same tree of PartitionSpec, extended to each leaf's rank.
      axis_sizes: devices along each mesh axis, in the mesh's order.
      declared_by: what decided the split of a weight, by its path in the tree.
      notes: what was left whole or dropped on the way, in sentences.
      forms: by path, of weights that have several leaves, the arrays that are kept of each.
    """

    shapes: PyTree
    specs: PyTree
    axis_sizes: Mapping[str, int]
    declared_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    forms: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def padded_shapes(self) -> PyTree:
        """The tree of ShapeDtypeStruct that arrays have wherever they cross a jit boundary."""

        def padded(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(padded_shape(x.shape, spec, self.axis_sizes), x.dtype)

        return jax.tree.map(padded, self.shapes, self.specs)

    def shardings(self, mesh: Mesh) -> PyTree:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs)

    def abstract(self, mesh: Mesh) -> PyTree:
        """Returns padded ShapeDtypeStructs with their shardings: what to lower or restore for."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self.padded_shapes, self.shardings(mesh),
        )

    def pad(self, tree: PyTree) -> PyTree:
        return pad_tree(tree, self.specs, self.axis_sizes)

    def unpad(self, tree: PyTree) -> PyTree:
        return unpad_tree(tree, self.shapes, self.specs)

    def is_of(self, tree: PyTree) -> bool:
        """Returns True if a tree has this structure, and leaves of these dtypes."""
        leaves, structure = jax.tree.flatten(tree)
        expected, expected_structure = jax.tree.flatten(self.shapes)
        return structure == expected_structure and all(
            getattr(x, "dtype", None) == y.dtype for x, y in zip(leaves, expected, strict=True)
        )

    def select(self, name: str) -> "StateLayout":
        """Returns the layout of a field of a TrainState, or of an entry of a dict."""

        def one(tree: PyTree) -> PyTree:
            return tree[name] if isinstance(tree, Mapping) else getattr(tree, name)
        start = f"{name}/"
        forms = {k.removeprefix(start): x for k, x in self.forms.items() if k.startswith(start)}
        return StateLayout(one(self.shapes), one(self.specs), self.axis_sizes, forms=forms)

    def leaves(self) -> Iterator[LeafLayout]:
        """Yields each leaf's layout in the tree's order."""
        leaves = leaves_with_path(self.shapes)
        for (path, x), spec in zip(leaves, jax.tree.leaves(self.specs), strict=True):
            axes = [axis for entry in spec for axis in axes_of(entry)]
            yield LeafLayout(
                path=path, shape=x.shape, dtype=x.dtype, spec=spec,
                padded_shape=padded_shape(x.shape, spec, self.axis_sizes),
                num_shards=math.prod(self.axis_sizes[axis] for axis in axes),
                declared_by=self.declared_by.get(path, ""),
            )


def state_layout(task: Task, axis_sizes: Mapping[str, int]) -> StateLayout:
    """Returns the layout of a task's TrainState on a mesh; see `layout_and_learner`."""
    return layout_and_learner(task, axis_sizes)[0]


def layout_and_learner(
    task: Task, axis_sizes: Mapping[str, int]
) -> tuple[StateLayout, BoundLearner]:
    """Returns the layout of a task's TrainState on a mesh, and the learner of its weights.

    No array is made.

    Args:
      task: its model declares splits, its learner has slots.
      axis_sizes: devices along each mesh axis, in the mesh's order.

    Raises:
      ConfigError: a weight's split does not fit its shape or the axes (names its path), or the
        learner's `slot_mesh_axes` not the mesh; a pattern of the learner's matches nothing.
    """
    decisions = decide_shardings(task.model.weight_specs(), task.weight_sharding, axis_sizes)
    weight_specs, axis_names = decisions.weight_specs, tuple(axis_sizes)
    spec_of = {
        path: weight.partition_spec(axis_names, path) for path, weight in spec_leaves(weight_specs)
    }
    # The key inside: outside it would be an array, of two programs that had to be compiled.
    mdl_shapes = jax.eval_shape(lambda: task.model.init(jax.random.key(0)))
    mdl_specs = jax.tree.map_with_path(lambda path, _: spec_of[path_of(path)], mdl_shapes)
    learner = task.learner.bind(weight_specs["params"], axis_sizes)
    groups, opt_shapes = learner.groups, jax.eval_shape(learner.init, mdl_shapes["params"])
    opt_specs = jax.tree.map(lambda x: PartitionSpec(*(None,) * x.ndim), opt_shapes)
    update_specs = mdl_specs["params"] if groups.update_specs is None else groups.update_specs
    opt_specs["slots"] = slot_specs(groups.by_name, groups.weight_specs, update_specs)
    if "ema" in opt_specs:
        opt_specs["ema"] = groups.split(update_specs)[0]
    layout = StateLayout(
        TrainState(jax.ShapeDtypeStruct((), "int32"), mdl_shapes, opt_shapes),
        TrainState(PartitionSpec(), mdl_specs, opt_specs), dict(axis_sizes), notes=decisions.notes,
        declared_by={f"mdl_vars/{p}": spec.declared_by for p, spec in spec_leaves(weight_specs)},
        forms={f"mdl_vars/{path}": form for path, form in task.model.kept_forms.items()},
    )
    return layout, learner
