"""Chooses sharding rules for arrays by matching their paths against a strategy's patterns.

Use strategies for trees that declare no shardings. Patterns and rule strings follow Big Vision: an
array is split by the rules for the first pattern that matches its complete path.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import praxis_lite.core.sharding.rules  # noqa: F401 - registers the library's rules.
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.leaf_paths import path_of, path_pattern
from praxis_lite.core.sharding.logical_axes import LogicalAxisRules, checked_rules
from praxis_lite.core.sharding.rule_names import (
    JobMesh,
    Leaf,
    Outcome,
    Rule,
    Spec,
    parsed_rules,
    rule_text,
)
from praxis_lite.core.sharding.split_dims import to_partition_spec

PyTree = Any
# (pattern, rules) pairs; see `parsed_rules`.
Strategy = Sequence[tuple[str, Any]]


def infer_sharding(
    tree: PyTree,
    strategy: Strategy,
    mesh: Mesh | AbstractMesh,
    *,
    logical_axis_rules: LogicalAxisRules = (),
) -> PyTree:
    """Returns a NamedSharding for each array in a tree, as Big Vision's `infer_sharding` does.

    Pass the result to `jax.device_put`, or to `jax.jit` as `out_shardings`. The rule `fsdp`
    replicates an array if none of its dims is divisible by the number of devices.

    Args:
      tree: Arrays, or objects with a shape and dtype, such as the result of `jax.eval_shape`. Flax
        boxes (`nn.LogicallyPartitioned`) are removed, and their names are used as logical axes.
      strategy: (pattern, rules) pairs, such as `[(".*/kernel", 'fsdp("data")')]`. An array is split
        by the rules for the first pattern that matches its complete path, such as
        "encoder/0/kernel". If no pattern matches, the array is replicated. For the rules, see
        `rule_names.parsed_rules`.
      mesh: Mesh that arrays are split over.
      logical_axis_rules: (name, mesh axes) pairs for the `logical_partitioning` rule.

    Raises:
      ConfigError: A rule or a pattern cannot be parsed, an axis is not in the mesh, or an axis is
        used twice. The message names the array.
    """
    flat, structure = jax.tree.flatten_with_path(tree, is_leaf=_is_box)
    leaves = []
    for path, leaf in flat:
        names, array = (leaf.names, leaf.value) if _is_box(leaf) else (None, leaf)
        leaves.append(Leaf(path_of(path), tuple(array.shape), array.dtype, names))
    rules = checked_rules(logical_axis_rules, "infer_sharding: logical_axis_rules")
    splits = rule_shardings(leaves, strategy, JobMesh(dict(mesh.shape), rules))
    specs = [
        (None,) * len(leaf.shape) if split is None else split.spec
        for leaf in leaves
        for split in [splits[leaf.path]]
    ]
    return jax.tree.unflatten(
        structure, [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    )


def _is_box(x: Any) -> bool:
    # Detects boxes of Flax Linen by their attributes, because this package does not import Flax.
    return hasattr(x, "names") and hasattr(x, "unbox")


def parsed_strategy(strategy: Strategy) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    """Checks the patterns in a strategy and parses its rules.

    Raises:
      BadPattern: A pattern is not a valid regular expression. BadPattern is also a re.error.
      ConfigError: An entry is not a pair, or its rules are invalid (see `parsed_rules`).
    """
    pairs = []
    for index, entry in enumerate(strategy):
        is_pair = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
        require(is_pair, f"strategy[{index}]", entry, "a pair (pattern, rules)")
        pattern, rules = entry
        path_pattern("strategy", pattern)
        if not isinstance(rules, str) and isinstance(rules, Sequence) and not rules:
            raise ConfigError(
                f"strategy: the pattern {pattern!r} has no rules ({rules!r}). Use 'replicate' to "
                "replicate weights, or remove the pattern."
            )
        pairs.append((pattern, rules))
    # As in Big Vision, an invalid pattern is reported before an invalid rule.
    return tuple((pattern, parsed_rules(rules)) for pattern, rules in pairs)


@dataclasses.dataclass(frozen=True)
class RuledSplit:
    """The result of applying rules to a leaf.

    Attributes:
      spec: Mesh axes per dim.
      decided_by: Strategy string of the rules that changed the spec, or "" if no rule changed it.
      notes: Notes for the layout report: why the leaf is replicated or was not split further.
    """

    spec: Spec
    decided_by: str = ""
    notes: tuple[str, ...] = ()


def rule_shardings(
    leaves: Iterable[Leaf], strategy: Strategy, job_mesh: JobMesh
) -> dict[str, RuledSplit | None]:
    """Returns how each leaf is split, keyed by path; None for a path that no pattern matches.

    Args:
      leaves: Leaves of a tree.
      strategy: (pattern, rules) pairs; see `parsed_rules`. The first pattern that matches the
        complete path of a leaf applies. Its rules are applied in order, each to the result of the
        previous rule.
      job_mesh: Sizes of the mesh axes, and the job's settings for names and padding.

    Raises:
      ConfigError: Two rules split the same dim or use the same axis, an axis is not in the mesh, or
        a rule raises an error. The message names the leaf.
    """
    pairs = parsed_strategy(strategy)
    splits: dict[str, RuledSplit | None] = {}
    for leaf in leaves:
        index = first_match(pairs, leaf.path)
        splits[leaf.path] = None if index is None else apply_rules(leaf, pairs[index][1], job_mesh)
    return splits


def first_match(pairs: Sequence[tuple[str, Any]], path: str) -> int | None:
    """Returns the index of the first pattern that matches the complete path, or None."""
    return next((i for i, (pattern, _) in enumerate(pairs) if re.fullmatch(pattern, path)), None)


def apply_rules(leaf: Leaf, rules: Sequence[Rule], job_mesh: JobMesh) -> RuledSplit:
    """Applies rules to a leaf in order.

    Raises:
      ConfigError: See `rule_shardings`.
    """
    spec = (*leaf.spec, *(None,) * (len(leaf.shape) - len(leaf.spec)))
    notes, skipped, deciding = [], [], []
    for rule in rules:
        text, outcome = rule_text(rule), rule(spec, leaf, job_mesh)
        if not isinstance(outcome, Outcome):
            outcome = Outcome(outcome)
        # Check the result, because rules may be user-defined.
        checked = to_partition_spec(
            outcome.spec,
            tuple(job_mesh.axis_sizes),
            rank=len(leaf.shape),
            path=f"{leaf.path}, split by {text}",
        )
        if tuple(checked) != spec:
            deciding.append(outcome.by or text)
        spec = tuple(checked)
        if outcome.note:
            notes.append(f"{text}: {outcome.note}")
        if outcome.skipped:
            skipped.append(f"{text}: replicated, {outcome.skipped}")
    # Skipped rules are reported only if no rule has split the array.
    notes += skipped if all(entry is None for entry in spec) else []
    return RuledSplit(spec, "|".join(deciding), tuple(notes))
