"""Strategies: the rules that split each array, chosen by patterns of their paths.

For trees that declare nothing. Patterns and the string form are Big Vision's; a leaf has the rules
of the first pattern that matches its whole path.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import praxis_lite.core.sharding.rules  # noqa: F401 - it registers the library's rules.
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


def parsed_strategy(strategy: Strategy) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    """Returns (pattern, rules) pairs, the patterns checked and the rules parsed.

    Raises:
      BadPattern: a pattern is not a regular expression; a re.error too.
      ConfigError: see `parsed_rules`; or an entry is not a pair.
    """
    pairs = []
    for entry in strategy:
        is_pair = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
        require(is_pair, "strategy: an entry", entry, "a pair (pattern, rules)")
        pattern, rules = entry
        path_pattern("strategy", pattern)
        if not isinstance(rules, str) and isinstance(rules, Sequence) and not rules:
            raise ConfigError(
                f"strategy: the pattern {pattern!r} has no rules ({rules!r}). Write 'replicate' "
                "for weights that are to be whole, or remove the pattern."
            )
        pairs.append((pattern, rules))
    # A pattern that cannot be read comes before a rule that cannot, as in Big Vision.
    return tuple((pattern, parsed_rules(rules)) for pattern, rules in pairs)


@dataclasses.dataclass(frozen=True)
class RuledSplit:
    """What rules made of a leaf.

    Attributes:
      spec: mesh axes per dim.
      decided_by: the rules that changed the spec, as a strategy has them; "": nothing changed it.
      notes: what is to be reported: why it is whole, or was not split further.
    """

    spec: Spec
    decided_by: str = ""
    notes: tuple[str, ...] = ()


def rule_shardings(
    leaves: Iterable[Leaf], strategy: Strategy, job_mesh: JobMesh
) -> dict[str, RuledSplit | None]:
    """Returns by path the rules' split of each leaf; None for a leaf that no pattern matches.

    Args:
      leaves: of a tree.
      strategy: (pattern, rules) pairs; see `parsed_rules`. A leaf has the rules of the first
        pattern that matches its whole path, applied in order, each to what the last one left.
      job_mesh: sizes of the mesh axes, and the job's settings of names and padding.

    Raises:
      ConfigError: two rules want one dim or one axis twice, an axis is not in the mesh, and what
        the rules raise; names the leaf.
    """
    pairs = parsed_strategy(strategy)
    splits: dict[str, RuledSplit | None] = {}
    for leaf in leaves:
        index = first_match(pairs, leaf.path)
        splits[leaf.path] = None if index is None else apply_rules(leaf, pairs[index][1], job_mesh)
    return splits


def first_match(pairs: Sequence[tuple[str, Any]], path: str) -> int | None:
    """Returns the place of the first pattern that matches the whole path."""
    return next((i for i, (pattern, _) in enumerate(pairs) if re.fullmatch(pattern, path)), None)


def apply_rules(leaf: Leaf, rules: Sequence[Rule], job_mesh: JobMesh) -> RuledSplit:
    """Returns how `rules`, in order, split a leaf.

    Raises:
      ConfigError: see `rule_shardings`.
    """
    spec = (*leaf.spec, *(None,) * (len(leaf.shape) - len(leaf.spec)))
    notes, skipped, deciding = [], [], []
    for rule in rules:
        text, outcome = rule_text(rule), rule(spec, leaf, job_mesh)
        if not isinstance(outcome, Outcome):
            outcome = Outcome(outcome)
        # A rule, also a user's, must return one entry per dim and each axis once.
        checked = to_partition_spec(
            outcome.spec, tuple(job_mesh.axis_sizes), rank=len(leaf.shape),
            path=f"{leaf.path}, split by {text}",
        )
        if tuple(checked) != spec:
            deciding.append(outcome.by or text)
        spec = tuple(checked)
        if outcome.note:
            notes.append(f"{text}: {outcome.note}")
        if outcome.skipped:
            skipped.append(f"{text}: left whole, {outcome.skipped}")
    notes += skipped if all(entry is None for entry in spec) else []
    return RuledSplit(spec, "|".join(deciding), tuple(notes))
