"""TrainState, and StateLayout, which describes the state's shapes, specs and padded shapes."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.learner.slots import slot_memory, slot_specs
from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.models.model import abstract_mdl_vars, spec_leaves
from praxis_lite.core.models.stacked_weights import HostWeight
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.memory_spaces import DEVICE, HOST, is_on_host, to_device, to_host
from praxis_lite.core.sharding.padding import pad_tree, padded_shape, unpad_tree
from praxis_lite.core.sharding.weight_sharding import decide_shardings
from praxis_lite.core.task import Task

__all__ = ("LeafLayout", "StateLayout", "TrainState")

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The training state, with the same fields as in Pax.

    Attributes:
      step: Number of steps, including skipped steps, as an int32 scalar.
      mdl_vars: `{"params": ..., "non_trainable": ...}`, nested dicts of arrays.
      opt_states: Result of `BoundLearner.init`: step counts, `"slots"` (keyed by group), and
        optional entries such as `"ema"`.
    """

    step: Any
    mdl_vars: Any
    opt_states: Any


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The layout of an array: its path, shapes, sharding, and where the sharding was declared."""

    path: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    num_shards: int
    declared_by: str = ""
    memory_kind: str = DEVICE

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Returns the array's sharding, including its memory kind, on a mesh."""
        return sharding_of(self.spec, self.memory_kind, mesh)

    @property
    def is_on_host(self) -> bool:
        return self.memory_kind == HOST

    @property
    def bytes_per_device(self) -> int:
        """Size of a device's shard in bytes, in device or host memory."""
        itemsize: int = self.dtype.itemsize
        return math.prod(self.padded_shape) * itemsize // self.num_shards

    @property
    def padding_share(self) -> float:
        """Fraction of the stored elements that are padding."""
        padded = math.prod(self.padded_shape)
        return 1.0 - math.prod(self.shape) / padded if padded else 0.0


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The layout of each leaf of a tree, with methods to pad, slice and place the tree.

    Attributes:
      shapes: Tree of ShapeDtypeStruct with logical (unpadded) shapes.
      specs: Tree of PartitionSpec, extended to each leaf's rank.
      axis_sizes: Number of devices along each mesh axis, in the mesh's order.
      declared_by: Maps a weight's path to a description of what determined its sharding.
      notes: Messages about replicated weights and dropped axis names.
      memory_kinds: Tree of "device" or "pinned_host", or None if all arrays are in device memory.
      forms: Maps the path of each weight that is stored as several arrays to its packed format.
    """

    shapes: PyTree
    specs: PyTree
    axis_sizes: Mapping[str, int]
    declared_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    memory_kinds: PyTree = None
    forms: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_host_memory(self) -> bool:
        return HOST in self._kinds

    @property
    def _kinds(self) -> list[str]:
        kinds = self.memory_kinds
        if kinds is None:
            return [DEVICE] * len(jax.tree.leaves(self.shapes))
        return jax.tree.leaves(kinds)

    @property
    def padded_shapes(self) -> PyTree:
        """Tree of ShapeDtypeStructs with the shapes of arrays at a jit boundary."""

        def padded(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(padded_shape(x.shape, spec, self.axis_sizes), x.dtype)

        return jax.tree.map(padded, self.shapes, self.specs)

    def shardings(self, mesh: Mesh) -> PyTree:
        specs, structure = jax.tree.flatten(self.specs)
        kinds = zip(specs, self._kinds, strict=True)
        return jax.tree.unflatten(structure, [sharding_of(*item, mesh) for item in kinds])

    def abstract(self, mesh: Mesh) -> PyTree:
        """Returns padded ShapeDtypeStructs with shardings, for lowering or restoring."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self.padded_shapes,
            self.shardings(mesh),
        )

    def pad(self, tree: PyTree, *, only_on_host: bool = False) -> PyTree:
        """Pads the leaves of `tree` and moves each to its memory space.

        Args:
          tree: Arrays with logical or padded shapes.
          only_on_host: Whether to process only leaves that belong in host memory.
        """
        leaves, structure = jax.tree.flatten(tree)
        specs, kinds = jax.tree.leaves(self.specs), self._kinds
        chosen = [kind == HOST or not only_on_host for kind in kinds]
        # An empty spec adds no padding.
        specs = [spec if x else PartitionSpec() for spec, x in zip(specs, chosen, strict=True)]
        padded = zip(pad_tree(leaves, specs, self.axis_sizes), kinds, strict=True)
        return jax.tree.unflatten(structure, [to_host(x) if k == HOST else x for x, k in padded])

    def unpad(self, tree: PyTree, *, except_on_host: bool = False) -> PyTree:
        """Returns `tree` without padding, in device memory.

        Args:
          tree: Arrays with padded shapes.
          except_on_host: Whether to return leaves in host memory unchanged, with their padding.
        """
        shapes = self.shapes
        if except_on_host:
            shapes = jax.tree.map(lambda x, shape: x if is_on_host(x) else shape, tree, shapes)
        return unpad_tree(tree if except_on_host else to_device(tree), shapes, self.specs)

    def wrap_host_weights(self, tree: PyTree) -> PyTree:
        """Wraps leaves in host memory as `HostWeight`s, as models expect them."""
        if not self.has_host_memory:  # Leaves need not be arrays under a gradient strategy.
            return tree
        return jax.tree.map(
            lambda x, shape, spec: HostWeight(x, shape.shape, spec) if is_on_host(x) else x,
            tree,
            self.shapes,
            self.specs,
        )

    def is_of(self, tree: PyTree) -> bool:
        """Returns whether a tree has the structure and the dtypes of this layout."""
        leaves, structure = jax.tree.flatten(tree)
        expected, expected_structure = jax.tree.flatten(self.shapes)
        # JAX's type annotations for tree structures refer to a module that does not exist.
        if structure != expected_structure:  # type: ignore[operator]
            return False
        return all(
            getattr(x, "dtype", None) == y.dtype for x, y in zip(leaves, expected, strict=True)
        )

    def select(self, name: str) -> "StateLayout":
        """Returns the layout of a field of a TrainState, or of an entry in a dict."""

        start = f"{name}/"
        forms = {k.removeprefix(start): x for k, x in self.forms.items() if k.startswith(start)}
        layout = self.mapped(
            lambda tree: tree[name] if isinstance(tree, Mapping) else getattr(tree, name)
        )
        return dataclasses.replace(layout, forms=forms)

    def mapped(self, function: Callable[[PyTree], PyTree]) -> "StateLayout":
        """Returns the layout of the leaves that `function` selects from a tree."""
        kinds = None if self.memory_kinds is None else function(self.memory_kinds)
        return StateLayout(
            function(self.shapes), function(self.specs), self.axis_sizes, memory_kinds=kinds
        )

    def leaves(self) -> Iterator[LeafLayout]:
        """Yields each leaf's LeafLayout in the tree's order."""
        leaves, specs = leaves_with_path(self.shapes), jax.tree.leaves(self.specs)
        for (path, x), spec, kind in zip(leaves, specs, self._kinds, strict=True):
            axes = [axis for entry in spec for axis in axes_of(entry)]
            yield LeafLayout(
                path=path,
                shape=x.shape,
                dtype=x.dtype,
                spec=spec,
                padded_shape=padded_shape(x.shape, spec, self.axis_sizes),
                num_shards=math.prod(self.axis_sizes[axis] for axis in axes),
                declared_by=self.declared_by.get(path, ""),
                memory_kind=kind,
            )


def sharding_of(spec: PartitionSpec, memory_kind: str, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array with this spec and memory kind on a mesh."""
    # Omit the memory kind for device memory, the default: some backends support only one memory
    # kind.
    return NamedSharding(mesh, spec, **({"memory_kind": HOST} if memory_kind == HOST else {}))


def layout_and_learner(
    task: Task, axis_sizes: Mapping[str, int]
) -> tuple[StateLayout, BoundLearner]:
    """Returns the layout of a task's TrainState on a mesh, and its bound learner.

    No arrays are created.

    Args:
      task: The task. Its model declares how weights are sharded; its learner defines the slots.
      axis_sizes: Number of devices along each mesh axis, in the mesh's order.

    Raises:
      ConfigError: A weight's sharding does not fit its shape or the mesh, `slot_mesh_axes` do not
        fit the mesh, one of the learner's patterns matches no weight, or variational noise is
        combined with weights in host memory.
    """
    # The sharding of weights comes first: everything else follows from it.
    decisions = decide_shardings(task.model.weight_specs(), task.weight_sharding, axis_sizes)
    weight_specs, axis_names = decisions.weight_specs, tuple(axis_sizes)
    weights = dict(spec_leaves(weight_specs))
    spec_of = {path: weight.partition_spec(axis_names, path) for path, weight in weights.items()}
    mdl_shapes = abstract_mdl_vars(weight_specs)
    mdl_specs = jax.tree.map_with_path(lambda path, _: spec_of[path_of(path)], mdl_shapes)
    bound_learner = task.learner.bind(weight_specs["params"], axis_sizes)
    groups = bound_learner.groups
    opt_shapes = jax.eval_shape(bound_learner.init, mdl_shapes["params"])
    # Counts are replicated. Slots and averages are sharded like updates, which may be split over
    # more axes than the weights.
    opt_specs = jax.tree.map(lambda x: PartitionSpec(*(None,) * x.ndim), opt_shapes)
    update_specs = mdl_specs["params"] if groups.update_specs is None else groups.update_specs
    opt_specs["slots"] = slot_specs(groups.by_name, groups.weight_specs, update_specs)
    if "ema" in opt_specs:
        opt_specs["ema"] = groups.split(update_specs)[0]
    shapes = TrainState(jax.ShapeDtypeStruct((), "int32"), mdl_shapes, opt_shapes)
    # Slots and weights may be stored in host memory.
    kinds = jax.tree.map(lambda _: DEVICE, shapes)
    kinds.opt_states.update(slot_memory(opt_shapes, bound_learner.weights_with_host_slots))
    kinds.mdl_vars.update(
        jax.tree.map_with_path(lambda path, _: weights[path_of(path)].memory_kind, mdl_shapes)
    )
    layout = StateLayout(
        shapes,
        TrainState(PartitionSpec(), mdl_specs, opt_specs),
        dict(axis_sizes),
        declared_by={f"mdl_vars/{path}": spec.declared_by for path, spec in weights.items()},
        notes=decisions.notes,
        memory_kinds=kinds,
        forms={f"mdl_vars/{path}": form for path, form in task.model.packed_forms.items()},
    )
    # The learner moves arrays between host and device memory, so it needs their layouts.
    if layout.has_host_memory:
        opt_layout = layout.select("opt_states")
        params = layout.select("mdl_vars").select("params")
        if params.has_host_memory and bound_learner.settings.variational_noise is not None:
            raise ConfigError(
                "Learner.variational_noise cannot be combined with weights in host memory "
                "(Repeat.offload_weights). Remove one of the two."
            )
        bound_learner.layouts = {name: opt_layout.select(name) for name in opt_shapes} | {
            "params": params.mapped(lambda tree: groups.split(tree)[0]),
        }
    return layout, bound_learner
