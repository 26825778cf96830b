"""Groups of weights that an optimizer updates together, computed once for a model on a mesh.

Stacked weights are updated one layer at a time (`jax.vmap` over the stack), as with Pax's
vectorized variable prefixes, so that every optimizer trains a scanned stack as an unrolled one.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import optax

from praxis_lite.core.learner.whole_tree_optimizers import over_whole_tree
from praxis_lite.core.sharding.devices.axis_types import stated, typed_alike
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
      optimizer: of one layer's weights; or, in a group with `stack_ranks`, of all of them.
      stack_shape: the leading dims of each weight, which count layers; () for single weights.
      paths: of the weights.
      optimizer_name: an auxiliary optimizer's, or "".
      stack_ranks: of a group whose optimizer looks beyond one weight, how many dims of each weight
        count layers; None: the optimizer sees the weights of one layer at a time.
    """

    optimizer: optax.GradientTransformation
    stack_shape: tuple[int, ...]
    paths: tuple[Path, ...]
    optimizer_name: str = ""
    stack_ranks: Mapping[Path, int] | None = None

    def of(self, tree: PyTree) -> dict[str, Any]:
        """Returns the nested dict of just these weights' leaves of a tree."""
        return select(tree, self.paths)

    def per_layer(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Returns `fn`, of a layer's trees, mapped over the stacked dims of all its arguments."""
        mapped = _vmapped(fn, len(self.stack_shape))
        return lambda *trees: mapped(*typed_alike(trees, len(self.stack_shape)))

    def per_weight(self, fn: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
        """Returns the tree after `fn`, which treats each weight by itself, a layer at a time."""
        if self.stack_ranks is None:
            return self.per_layer(fn)(tree)

        def applied(node: Any, path: Path) -> Any:
            if isinstance(node, Mapping):
                return {name: applied(child, (*path, name)) for name, child in node.items()}
            return _vmapped(fn, self.stack_ranks[path])(node)

        return applied(self.of(tree), ())


@dataclasses.dataclass(frozen=True)
class WeightGroups:
    """The groups of a model's weights, computed by `Learner.bind`.

    Attributes:
      weight_specs: nested dict of WeightSpec, of all weights.
      by_name: the groups. Weights without a stacked dim are "unstacked", those of a scanned stack
        of 7 "stack_7"; an auxiliary optimizer's are "NAME.unstacked", "NAME.stack_7".
      update_specs: a PartitionSpec for each weight, which gradients, slots and averages follow;
        None: gradients have no stated layout, and slots follow the weights.
    """

    weight_specs: PyTree
    by_name: Mapping[str, Group]
    update_specs: PyTree = None

    def split(self, tree: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns (trained, frozen): nested dicts without each other's leaves.

        Args:
          tree: of the weights' structure, with any leaves: arrays, specs.
        """
        trained = {path for group in self.by_name.values() for path in group.paths}
        # In the weights' order: that of a set differs between processes.
        paths = [path for path, _ in spec_items(self.weight_specs)]
        frozen = select(tree, [path for path in paths if path not in trained])
        return select(tree, [path for path in paths if path in trained]), frozen

    def by_optimizer(self, tree: PyTree) -> dict[str, list[PyTree]]:
        """Returns the trained weights' leaves of a tree by the name of their optimizer."""
        local: dict[str, list[PyTree]] = {}
        for group in self.by_name.values():
            local.setdefault(group.optimizer_name, []).append(group.of(tree))
        return local

    def lay_out(self, tree: PyTree) -> PyTree:
        """Returns `tree` with the layout of `update_specs` stated to XLA, or as it is without them.

        Args:
          tree: a value of the logical shape for each weight, or for each trained one.
        """

        def constrain(node: Any, spec: Any) -> Any:
            if isinstance(node, Mapping):
                return {name: constrain(child, spec[name]) for name, child in node.items()}
            # Arrays on the host keep the layout they are stored in.
            return node if is_on_host(node) else stated(node, spec)

        return tree if self.update_specs is None else constrain(tree, self.update_specs)


def grouped(
    weight_specs: PyTree, names: Mapping[str, str],
    optimizers: Mapping[str, optax.GradientTransformation], *, by_stack: bool = True,
    together: Collection[str] = (),
) -> dict[str, Group]:
    """Returns the groups of `WeightGroups` by their names.

    Args:
      names: of `optimizer_names`.
      optimizers: by these names.
      by_stack: False: a stack is one array, and belongs to "unstacked".
      together: names of optimizers that look beyond one weight: each has one group, "whole".
    """
    members: dict[tuple[str, tuple[int, ...]], list[Path]] = {}
    groups, stack_ranks = {}, {name: dict[Path, int]() for name in together}
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
    """Returns the nested dict of just the leaves of `tree` at `paths`."""
    selected: dict[str, Any] = {}
    for path in paths:
        leaf, target = tree, selected
        for part in path[:-1]:
            leaf, target = leaf[part], target.setdefault(part, {})
        target[path[-1]] = leaf[path[-1]]
    return selected


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested dict that holds the leaves of both."""
    both = dict(a)
    for name, value in b.items():
        both[name] = merged(both[name], value) if name in both else value
    return both
