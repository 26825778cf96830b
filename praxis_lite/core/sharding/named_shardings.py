"""From a tree of arrays and rules to NamedShardings, in a single call."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.sharding.leaf_paths import path_of
from praxis_lite.core.sharding.logical_axes import LogicalAxisRules, checked_rules
from praxis_lite.core.sharding.rule_names import JobMesh, Leaf
from praxis_lite.core.sharding.strategies import Strategy, rule_shardings

PyTree = Any


def infer_sharding(
    tree: PyTree,
    strategy: Strategy,
    mesh: Mesh | AbstractMesh,
    *,
    logical_axis_rules: LogicalAxisRules = (),
) -> PyTree:
    """Returns the tree with a NamedSharding in the place of each array.

    Arguments and answers are those of Big Vision's `infer_sharding`. The result goes to
    `jax.device_put`, or to `jax.jit` as `out_shardings`. `fsdp` leaves whole what does not divide.

    Args:
      tree: arrays, or what has their shape and dtype (`jax.eval_shape` gives it). Names of dims
        are read from Flax's boxes (`nn.LogicallyPartitioned`), which are taken off.
      strategy: (pattern, rules) pairs, such as `[(".*/kernel", 'fsdp("data")')]`. An array has the
        rules of the first pattern that matches the whole of its path, "encoder/0/kernel"; without
        one it is on every device. See `rule_names.parsed_rules` for rules.
      mesh: over its axes arrays are split.
      logical_axis_rules: (name, mesh axes) pairs, for the rule `logical_partitioning`.

    Raises:
      ConfigError: a rule or a pattern cannot be read, an axis is not in the mesh or wanted twice;
        names the array.
    """
    flat, structure = jax.tree.flatten_with_path(tree, is_leaf=_is_box)
    leaves = []
    for path, leaf in flat:
        names, array = (leaf.names, leaf.value) if _is_box(leaf) else (None, leaf)
        leaves.append(Leaf(path_of(path), tuple(array.shape), array.dtype, names))
    rules = checked_rules(logical_axis_rules, "infer_sharding: logical_axis_rules")
    splits = rule_shardings(leaves, strategy, JobMesh(dict(mesh.shape), rules))
    specs = [
        (None,) * len(leaf.shape) if splits[leaf.path] is None else splits[leaf.path].spec
        for leaf in leaves
    ]
    return jax.tree.unflatten(
        structure, [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    )


def _is_box(x: Any) -> bool:
    # Of Flax Linen, which this package does not import.
    return hasattr(x, "names") and hasattr(x, "unbox")
