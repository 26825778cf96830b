"""Decides how weights are sharded, based on the layers' declarations and the job's rules."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from praxis_lite.core.errors import ConfigError, did_you_mean, require
from praxis_lite.core.sharding.logical_axes import MeshAxes, axes_of, checked_rules
from praxis_lite.core.sharding.rule_names import JobMesh, Leaf, Rule, Spec, rule_text
from praxis_lite.core.sharding.rules import LogicalPartitioning
from praxis_lite.core.sharding.strategies import apply_rules, first_match, parsed_strategy
from praxis_lite.core.sharding.weight_spec import WeightSpec, spec_items

PyTree = Any
AxisRules = Sequence[tuple[str, MeshAxes | Sequence[str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSharding:
    """A job's rules for weights whose layers declare no mesh axes.

    Attributes:
      strategy: (pattern, rules) pairs. A weight is split by the rules for the first pattern that
        matches its complete path under params. A pattern's rules are a string such as
        `'shard_dim("mdl", -1)|fsdp("data", 0)'`, a rule object, or a list of these. The rules start
        from the mesh axes that the layer declares, and use logical names only if the rules include
        `logical_partitioning`. If no pattern matches, logical names are resolved directly. If
        `strategy` is None, no patterns are used.
      logical_axis_rules: (name, mesh axes) pairs; the first applicable pair wins. Alternatively, a
        dict of such lists, keyed by name.
      logical_axis_rules_name: Key of the list to use if `logical_axis_rules` is a dict.
      allow_padding: Whether `fsdp` may split a dim that is not divisible by the number of devices.
      unmapped_logical_axes: How to treat a name that has no rule and is not a mesh axis: "error",
        or "replicate" to leave the dim unsplit and report it.
      stack_axis_names: Names of leading dims that stack layers. Optimizers that use complete
        tensors process these stacks one layer at a time.

    Raises:
      ConfigError: A pattern or rule cannot be parsed, `strategy` or the rules for a pattern are
        empty, or `logical_axis_rules_name` is not a key of `logical_axis_rules`.
    """

    strategy: Sequence[tuple[str, Any]] | None = None
    logical_axis_rules: Mapping[str, AxisRules] | AxisRules = ()
    logical_axis_rules_name: str | None = None
    allow_padding: bool = True
    unmapped_logical_axes: Literal["error", "replicate"] = "error"
    stack_axis_names: Sequence[str] = ("layers",)

    def __post_init__(self) -> None:
        unmapped, names = self.unmapped_logical_axes, self.stack_axis_names
        require(
            unmapped in ("error", "replicate"),
            "WeightSharding.unmapped_logical_axes",
            unmapped,
            "'error' or 'replicate'",
        )
        expected = f"a sequence of names, such as ({names!r},)"
        require(not isinstance(names, str), "WeightSharding.stack_axis_names", names, expected)
        if self.strategy is not None and not len(self.strategy):
            raise ConfigError(
                f"WeightSharding.strategy is {self.strategy!r}; expected "
                """(pattern, rules) pairs, such as (".*", 'fsdp("data")'). Add a pair, or omit """
                "strategy if logical_axis_rules or the layers determine how weights are sharded."
            )
        # Parse the rules here, so that errors are raised before a model is built.
        _ = self.pairs, self.rules_in_use

    @functools.cached_property
    def pairs(self) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
        """The strategy with parsed rules."""
        return parsed_strategy(self.strategy or ())

    @functools.cached_property
    def rules_in_use(self) -> tuple[tuple[str, MeshAxes], ...]:
        """The logical axis rules to apply."""
        rules, name = self.logical_axis_rules, self.logical_axis_rules_name
        setting = "WeightSharding.logical_axis_rules"
        if not isinstance(rules, Mapping):
            if name is not None:
                raise ConfigError(
                    f"{setting}_name is {name!r}, but logical_axis_rules is a single list. Remove "
                    "the name, or pass a dict of lists."
                )
            return checked_rules(rules, setting)
        checked = {key: checked_rules(rule, f"{setting}[{key!r}]") for key, rule in rules.items()}
        if name not in checked:
            raise ConfigError(
                f"{setting}_name is {name!r}, but logical_axis_rules has the keys "
                f"{', '.join(checked) or '(none)'}.{did_you_mean(name or '', checked)} Set "
                "logical_axis_rules_name to one of these keys."
            )
        return checked[name]


@dataclasses.dataclass(frozen=True)
class ShardingDecisions:
    """How all weights of a job are sharded on a mesh.

    Attributes:
      weight_specs: The model's tree of WeightSpecs, with names resolved to mesh axes and
        `declared_by` filled in.
      notes: Messages about replicated weights and dropped names, each with the affected weights.
    """

    weight_specs: PyTree
    notes: tuple[str, ...] = ()


def decide_shardings(
    weight_specs: PyTree, declared: WeightSharding | None, axis_sizes: Mapping[str, int]
) -> ShardingDecisions:
    """Decides how all weights are split over the axes of a mesh.

    Args:
      weight_specs: {"params", "non_trainable"}: nested dicts of WeightSpec, as declared by the
        model. Patterns are matched against "params" only.
      declared: The job's rules, or None.
      axis_sizes: Number of devices along each mesh axis, in the mesh's order.

    Raises:
      ConfigError: A pattern matches no weight, two rules split the same dim, an axis is not in the
        mesh, a name has no rule, or there are more names than dims.
    """
    declared = declared or WeightSharding()
    check_axes(declared.rules_in_use, axis_sizes)
    job_mesh = JobMesh(
        axis_sizes,
        declared.rules_in_use,
        declared.allow_padding,
        unmapped_is_error=declared.unmapped_logical_axes == "error",
    )
    paths = sorted("/".join(path) for path, _ in spec_items(weight_specs.get("params", {})))
    _check_patterns(declared.pairs, paths)
    has_rules = bool(declared.pairs or declared.rules_in_use)
    # Indices of the patterns that determine the sharding of at least one weight.
    used: set[int] = set()
    notes: dict[str, list[str]] = {}  # Maps a note to the weights that it applies to.

    def decide(path: tuple[str, ...], spec: WeightSpec) -> WeightSpec:
        leaf, is_param = _leaf(path, spec, declared, axis_sizes), path[0] == "params"
        index = first_match(declared.pairs, leaf.path) if is_param else None
        # The job's patterns take precedence over logical names, which take precedence over the
        # layer's own split.
        if index is not None:
            used.add(index)
            split, by, message = _by_strategy(spec, leaf, *declared.pairs[index], job_mesh)
        elif leaf.logical_axes is not None:
            split, by, message = _by_names(spec, leaf, job_mesh)
        else:
            split, by, message = _as_declared(spec, leaf, add_note=has_rules and is_param)
        slot_axes, slot_notes = _slots(path, spec, declared, job_mesh)
        for note in (*message, *slot_notes):
            notes.setdefault(note, []).append(f"{leaf.path} {list(spec.shape)}")
        spec = dataclasses.replace(spec, declared_by=by, slot_axes=slot_axes, logical_axis_rules=())
        if split is None:
            return spec
        return dataclasses.replace(
            spec,
            stack_split_dims_mapping=split[: leaf.num_stacked],
            split_dims_mapping=split[leaf.num_stacked :],
            logical_axes=None,
        )

    def decide_all(node: Any, path: tuple[str, ...]) -> Any:  # In the order of declaration.
        if isinstance(node, WeightSpec):
            return decide(path, node)
        return {name: decide_all(child, (*path, name)) for name, child in node.items()}

    decided_specs = decide_all(weight_specs, ())
    sentences = [f"{_some(weights)}: {text}." for text, weights in notes.items()]
    sentences += [
        f"rule '{pattern}' is unused: earlier patterns match all of its weights."
        for index, (pattern, _) in enumerate(declared.pairs)
        if index not in used
    ]
    return ShardingDecisions(decided_specs, tuple(sentences))


def _leaf(
    path: tuple[str, ...], spec: WeightSpec, declared: WeightSharding, axis_sizes: Mapping[str, int]
) -> Leaf:
    """Returns a weight as a Leaf, with its complete shape and the mesh axes its layer declares."""
    start = tuple(spec.partition_spec(tuple(axis_sizes), "/".join(path)))
    num_stacked, names = len(spec.stack_split_dims_mapping), spec.logical_axes
    if names is not None:
        ruled = {*dict(declared.rules_in_use), *dict(spec.logical_axis_rules), *axis_sizes}
        # The leading dims with names in `stack_axis_names` are stacked.
        is_stack = [name in declared.stack_axis_names for name in names]
        num_named = is_stack.index(False) if False in is_stack else len(is_stack)
        # The stack's split takes precedence, and names of stacked dims need no rule.
        names = tuple(
            None if any(start[dim : dim + 1]) or (is_stack[dim] and name not in ruled) else name
            for dim, name in enumerate(names)
        )
        num_stacked = max(num_stacked, min(num_named, len(spec.shape)))
    name = "/".join(path[1:] if path[0] == "params" else path)
    rules = spec.logical_axis_rules
    return Leaf(name, spec.shape, spec.dtype, names, rules, start, num_stacked)


# (spec of the complete shape or None for the layer's declaration, source of the spec, notes)
_Decision = tuple[Spec | None, str, Sequence[str]]


def _by_strategy(
    spec: WeightSpec, leaf: Leaf, pattern: str, rules: Sequence[Rule], job_mesh: JobMesh
) -> _Decision:
    split = apply_rules(leaf, rules, job_mesh)
    source, notes = f"rule '{pattern}'", list(split.notes)
    by = split.decided_by or f"{'|'.join(map(rule_text, rules))} does not change it"
    start = f"{_declared_by(spec)}, then " if any(leaf.spec) else ""
    if leaf.logical_axes and not any(isinstance(rule, LogicalPartitioning) for rule in rules):
        notes.append("logical names are ignored without the rule logical_partitioning")
    notes = [f"{source}: {note}" for note in notes]
    return split.spec, f"{start}{source}: {by}", notes


def _by_names(spec: WeightSpec, leaf: Leaf, job_mesh: JobMesh) -> _Decision:
    split, source = apply_rules(leaf, (LogicalPartitioning(),), job_mesh), _declared_by(spec)
    by = f"{source}: {split.decided_by or 'no mesh axis'}"
    notes = [note.removeprefix("logical_partitioning: ") for note in split.notes]
    return split.spec, by, [f"{source}: {note}" for note in notes]


def _slots(
    path: tuple[str, ...], spec: WeightSpec, declared: WeightSharding, job_mesh: JobMesh
) -> tuple[Spec | None, Sequence[str]]:
    """Returns the spec that a weight declares for its slots, or None, together with notes."""
    if spec.slot_axes is None:
        return None, ()
    slots = dataclasses.replace(
        spec, split_dims_mapping=None, logical_axes=spec.slot_axes, declared_by="its slots"
    )
    leaf = _leaf(path, slots, declared, job_mesh.axis_sizes)
    split, _, notes = _by_names(slots, leaf, job_mesh)
    return split, notes


def _as_declared(spec: WeightSpec, leaf: Leaf, *, add_note: bool) -> _Decision:
    is_undeclared = spec.split_dims_mapping is None and not any(leaf.spec)
    notes = ("replicated: no pattern or name splits it",) if is_undeclared and add_note else ()
    return None, _declared_by(spec), notes


def _declared_by(spec: WeightSpec) -> str:
    if spec.declared_by:
        return spec.declared_by
    if spec.logical_axes is not None:
        return f"logical axes {tuple(spec.logical_axes)}"
    if spec.split_dims_mapping is not None:
        return "weight_split_dims_mapping"
    is_stack = any(spec.stack_split_dims_mapping)
    return "the stack's split" if is_stack else "default: no split declared"


def check_axes(rules: AxisRules, axis_sizes: Mapping[str, int]) -> None:
    """Raises ConfigError if a rule uses an axis that the mesh does not have."""
    for name, entry in rules:
        for axis in axes_of(entry):
            if axis not in axis_sizes:
                raise ConfigError(
                    f"WeightSharding.logical_axis_rules: {(name, entry)} uses the axis '{axis}', "
                    f"but the mesh has {tuple(axis_sizes)}.{did_you_mean(axis, axis_sizes)} Fix "
                    "the rule or mesh.axis_names."
                )


def _check_patterns(pairs: Sequence[tuple[str, Any]], paths: Sequence[str]) -> None:
    for pattern, _ in pairs:
        if any(re.fullmatch(pattern, path) for path in paths):
            continue
        hint = did_you_mean(pattern, paths)
        if part := next((path for path in paths if re.search(pattern, path)), ""):
            hint = f" It only matches part of {part}: add '.*' at its beginning or end."
        if pattern.startswith("params/"):
            hint = " Paths do not begin with params/."
        raise ConfigError(
            f"WeightSharding.strategy: {pattern!r} matches no weight. A pattern must match the "
            f"complete path.{hint} The model has {_some(paths) or 'no weights'}."
        )


def _some(weights: Sequence[str]) -> str:
    if len(weights) <= 3:
        return ", ".join(weights)
    return f"{len(weights)} weights, such as {', '.join(weights[:2])}"
