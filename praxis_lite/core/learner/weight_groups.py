"""Groups of weights that an optimizer updates together, computed once per model and mesh.

Stacked weights are updated one layer at a time (`jax.vmap` over the stack), like variables with
Pax's vectorized prefixes, so that optimizers treat scanned and unrolled layers alike.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import optax

from praxis_lite.core.learner.whole_tree_optimizers import over_whole_tree
from praxis_lite.core.sharding.devices.axis_types import constrain_to_spec, with_common_dim_types
from praxis_lite.core.sharding.memory_spaces import is_on_host
from praxis_lite.core.sharding.weight_spec import spec_items

__all__ = ("Group",)

PyTree = Any
Path = tuple[str, ...]


def _vmapped(fn: Callable[..., PyTree], num_dims: int) -> Callable[..., PyTree]:
    return functools.reduce(lambda mapped, _: jax.vmap(mapped), range(num_dims), fn)


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that an optimizer updates together.

    Attributes:
      optimizer: Updates the weights of one layer, or all weights at once if `stack_ranks` is set.
      stack_shape: Sizes of the leading dims that stack layers, or () for unstacked weights.
      paths: Paths of the weights.
      optimizer_name: Name of an auxiliary optimizer, or "" for the main optimizer.
      stack_ranks: For optimizers whose update for a weight depends on other weights, maps the path
        of each weight to the number of its leading dims that stack layers. None if the optimizer
        updates one layer at a time.
    """

    optimizer: optax.GradientTransformation
    stack_shape: tuple[int, ...]
    paths: tuple[Path, ...]
    optimizer_name: str = ""
    stack_ranks: Mapping[Path, int] | None = None

    def select(self, tree: PyTree) -> dict[str, Any]:
        """Returns a nested dict with the leaves of `tree` at the paths of this group."""
        return select(tree, self.paths)

    def per_layer(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Maps `fn`, which takes the trees for one layer, over the stacked dims of the group."""
        mapped = _vmapped(fn, len(self.stack_shape))
        return lambda *trees: mapped(*with_common_dim_types(trees, len(self.stack_shape)))

    def per_weight(self, fn: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
        """Applies `fn` to each weight of a tree separately, one layer at a time."""
        stack_ranks = self.stack_ranks
        if stack_ranks is None:
            return self.per_layer(fn)(tree)

        def apply(node: Any, path: Path) -> Any:
            if isinstance(node, Mapping):
                return {name: apply(child, (*path, name)) for name, child in node.items()}
            return _vmapped(fn, stack_ranks[path])(node)

        return apply(self.select(tree), ())


@dataclasses.dataclass(frozen=True)
class WeightGroups:
    """The groups of a model's weights, computed by `Learner.bind`.

    Attributes:
      weight_specs: Nested dict of WeightSpec for all weights.
      by_name: The groups, keyed by name: "unstacked" for weights without stacked dims, and
        "stack_7" for a scanned stack of 7 layers. Groups of auxiliary optimizers have a prefix, as
        in "NAME.stack_7".
      update_specs: A PartitionSpec per weight for its gradient, slots and average. If None,
        gradients are not constrained, and slots are split like the weights.
    """

    weight_specs: PyTree
    by_name: Mapping[str, Group]
    update_specs: PyTree = None

    def split(self, tree: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits a tree with the structure of the weights into (trained, frozen) nested dicts."""
        trained = {path for group in self.by_name.values() for path in group.paths}
        # Keep the order of the weights, because the order of a set differs between processes.
        paths = [path for path, _ in spec_items(self.weight_specs)]
        frozen = select(tree, [path for path in paths if path not in trained])
        return select(tree, [path for path in paths if path in trained]), frozen

    def by_optimizer(self, tree: PyTree) -> dict[str, list[PyTree]]:
        """Returns the leaves for trained weights, grouped by the name of the optimizer."""
        local: dict[str, list[PyTree]] = {}
        for group in self.by_name.values():
            local.setdefault(group.optimizer_name, []).append(group.select(tree))
        return local

    def lay_out(self, tree: PyTree) -> PyTree:
        """Constrains arrays to `update_specs`, if they are set.

        Args:
          tree: Arrays with logical shapes, one per weight or per trained weight.
        """

        def constrain(node: Any, spec: Any) -> Any:
            if isinstance(node, Mapping):
                return {name: constrain(child, spec[name]) for name, child in node.items()}
            # Arrays in host memory keep the sharding they are stored with.
            return node if is_on_host(node) else constrain_to_spec(node, spec)

        return tree if self.update_specs is None else constrain(tree, self.update_specs)


def grouped(
    weight_specs: PyTree,
    names: Mapping[str, str],
    optimizers: Mapping[str, optax.GradientTransformation],
    *,
    by_stack: bool = True,
    whole_tree: Collection[str] = (),
) -> dict[str, Group]:
    """Groups the trained weights by optimizer and layer stack; returns a dict keyed by group name.

    Args:
      weight_specs: Nested dict of WeightSpec.
      names: Optimizer names, keyed by weight path, from `optimizer_names`.
      optimizers: Optimizers, keyed by name.
      by_stack: Whether to update stacks one layer at a time. If False, stacks are treated as single
        arrays in the group "unstacked".
      whole_tree: Names of optimizers whose update for a weight depends on other weights. Each of
        these optimizers gets a single group, "whole".
    """
    # An optimizer has one group per stack shape, or a single group if it needs the whole tree.
    members: dict[tuple[str, tuple[int, ...]], list[Path]] = {}
    groups, stack_ranks = {}, {name: dict[Path, int]() for name in whole_tree}
    for path, spec in spec_items(weight_specs):
        name = names.get("/".join(path))
        if name in stack_ranks:
            stack_ranks[name][path] = len(spec.stack_shape) if by_stack else 0
        elif name is not None:
            members.setdefault((name, spec.stack_shape if by_stack else ()), []).append(path)
    for name, ranks in stack_ranks.items():
        optimizer = over_whole_tree(optimizers[name], ranks)
        group = Group(optimizer, (), tuple(ranks), name, ranks)
        groups[f"{name}.whole" if name else "whole"] = group
    for (name, stack_shape), paths in members.items():
        stack = "stack_" + "x".join(map(str, stack_shape)) if stack_shape else "unstacked"
        group = Group(optimizers[name], stack_shape, tuple(paths), name)
        groups[f"{name}.{stack}" if name else stack] = group
    return groups


def select(tree: PyTree, paths: Iterable[Path]) -> dict[str, Any]:
    """Returns a nested dict with the leaves of `tree` at `paths`."""
    selected: dict[str, Any] = {}
    for path in paths:
        leaf, target = tree, selected
        for part in path[:-1]:
            leaf, target = leaf[part], target.setdefault(part, {})
        target[path[-1]] = leaf[path[-1]]
    return selected


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Merges two nested dicts with disjoint leaves."""
    both = dict(a)
    for name, value in b.items():
        both[name] = merged(both[name], value) if name in both else value
    return both
