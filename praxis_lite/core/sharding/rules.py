"""The four sharding rules of Big Vision's `infer_sharding`.

A rule takes the current spec of an array and returns a new spec. The module `strategies` chooses
the rules for each array. See https://github.com/google-research/big_vision.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, did_you_mean, is_number, require
from praxis_lite.core.sharding.logical_axes import axes_of, logical_to_mesh_axes
from praxis_lite.core.sharding.rule_names import (
    JobMesh,
    Leaf,
    Outcome,
    Rule,
    Spec,
    UnknownName,
    register_rule,
    rule_text,
)


@register_rule("replicate")
@dataclasses.dataclass(frozen=True)
class Replicate:
    """Replicates a leaf; raises an error if it is already split."""

    def __call__(self, spec: Spec, leaf: Leaf, job_mesh: JobMesh) -> Outcome:
        if any(entry is not None for entry in spec):
            raise ConfigError(
                f"{leaf.path}: `replicate` expects a replicated array, but it is already split as "
                f"{spec}. Remove the rule, or the earlier split."
            )
        return Outcome(spec)


@register_rule("fsdp")
@dataclasses.dataclass(frozen=True)
class Fsdp:
    """Splits the largest unsplit dim that is divisible by the number of devices.

    If several dims are equally large, the last one is split. If no unsplit dim is divisible and
    `allow_padding` is set, the rule splits the largest unsplit dim with at least one element per
    device. Dims that stack layers are split only if no other dim can be split.

    Attributes:
      axis: One or more mesh axes over which the dim is split.
      min_size_to_shard_mb: Leaves of at most this many MiB are replicated.
      min_weight_size: If set, replaces the limit in MiB with a limit on the number of elements.
        JAX's notebook on FSDP with shard_map uses 2**18.
    """

    axis: str | Sequence[str]
    min_size_to_shard_mb: float = 4
    min_weight_size: int | None = None

    def __post_init__(self) -> None:
        _check_axes(self.axis, self)
        for size in (self.min_size_to_shard_mb, self.min_weight_size or 0):
            require(is_number(size), f"{rule_text(self)}: the size", size, "a number")

    def __call__(self, spec: Spec, leaf: Leaf, job_mesh: JobMesh) -> Outcome:
        axes = axes_of(self.axis)
        for axis in axes:
            if axis not in job_mesh.axis_sizes:
                names = tuple(job_mesh.axis_sizes)
                raise UnknownName(
                    f"{leaf.path}: {rule_text(self)} uses the axis '{axis}', but the mesh has "
                    f"{names}.{did_you_mean(axis, names)} Fix the rule or mesh.axis_names."
                )
        num_shards = math.prod(job_mesh.axis_sizes[axis] for axis in axes)
        size = math.prod(leaf.shape)
        max_size: float | None = self.min_weight_size
        if max_size is None:
            size *= np.dtype(leaf.dtype).itemsize
            max_size = self.min_size_to_shard_mb * 2**20
        if size <= max_size:
            elements = self.min_weight_size
            limit = f"{self.min_size_to_shard_mb} MiB" if elements is None else f"{elements:,}"
            return Outcome(spec, skipped=f"size at most {limit}")
        # Do not use numpy.argsort: its order of equal sizes depends on the processor.
        dims = sorted(range(len(spec)), key=lambda dim: (leaf.shape[dim], dim), reverse=True)
        # A stacked dim is split only if no other dim fits, and a dim is padded only if none of its
        # kind is divisible.
        for is_stacked in (False, True):
            candidates = [dim for dim in dims if (dim < leaf.num_stacked) == is_stacked]
            unsplit = [dim for dim in candidates if spec[dim] is None]
            fitting = [dim for dim in unsplit if leaf.shape[dim] % num_shards == 0]
            if not fitting and job_mesh.allow_padding:
                fitting = [dim for dim in unsplit if leaf.shape[dim] >= num_shards]
            if fitting:
                return Outcome((*spec[: fitting[0]], axes, *spec[fitting[0] + 1 :]))
        if job_mesh.allow_padding:
            note = f"no unsplit dim has at least {num_shards} elements"
        else:
            note = f"no unsplit dim is divisible by {num_shards} devices"
        return Outcome(spec, note=note)


@register_rule("shard_dim")
@dataclasses.dataclass(frozen=True)
class ShardDim:
    """Splits the dim at a given index.

    Attributes:
      axis: One or more mesh axes.
      dim: Index of the dim. Negative indices count from the end. As in Big Vision, an array of rank
        n has no dim -n: use 0 for its first dim.
      ignore_ndim_error: Whether to skip leaves without this dim instead of raising an error.
    """

    axis: str | Sequence[str]
    dim: int
    ignore_ndim_error: bool = False

    def __post_init__(self) -> None:
        _check_axes(self.axis, self)
        is_integer = isinstance(self.dim, int) and not isinstance(self.dim, bool)
        require(is_integer, f"{rule_text(self)}: the dim", self.dim, "an integer")

    def __call__(self, spec: Spec, leaf: Leaf, job_mesh: JobMesh) -> Outcome:
        if abs(self.dim) >= len(spec):
            if self.ignore_ndim_error:
                return Outcome(spec, skipped=f"no dim {self.dim}")
            raise ConfigError(
                f"{leaf.path}: {rule_text(self)} does not fit the shape {leaf.shape}: the absolute "
                f"value of the dim must be below {len(spec)}. Make the pattern match fewer leaves, "
                "or set ignore_ndim_error=True."
            )
        dim = self.dim % len(spec)
        if spec[dim] is not None:
            raise ConfigError(
                f"{leaf.path}: {rule_text(self)} splits dim {dim}, but the spec {spec} already "
                f"splits it over {spec[dim]}. Choose a different dim, or remove one of the splits."
            )
        return Outcome((*spec[:dim], axes_of(self.axis), *spec[dim + 1 :]))


@register_rule("logical_partitioning")
@dataclasses.dataclass(frozen=True)
class LogicalPartitioning:
    """Splits the dims whose logical names resolve to mesh axes; see `logical_to_mesh_axes`.

    The leaf's rules are applied first, then the job's rules. If a name has no rule but is a mesh
    axis, it resolves to that axis. If the mesh axes for a name are already used, the name's dim is
    not split, and this is noted in the layout report.
    """

    def __call__(self, spec: Spec, leaf: Leaf, job_mesh: JobMesh) -> Outcome:
        if leaf.logical_axes is None:
            return Outcome(spec, skipped="no logical names")
        names = tuple(leaf.logical_axes)
        if len(names) > len(spec):
            raise ConfigError(
                f"{leaf.path} has {len(names)} logical axes {names}, but only {len(spec)} dims: "
                f"its shape is {leaf.shape}. Remove {len(names) - len(spec)} of the names."
            )
        # The first rule for a name applies, so the weight's rules have priority over the job's.
        rules = (*leaf.logical_axis_rules, *job_mesh.logical_axis_rules)
        split = logical_to_mesh_axes(
            (*names, *(None,) * (len(spec) - len(names))),
            rules,
            axis_names=job_mesh.axis_sizes,
            taken=[axis for entry in spec for axis in axes_of(entry)],
            path=leaf.path,
        )
        if split.unmapped and job_mesh.unmapped_is_error:
            name, known = split.unmapped[0], dict(rules)
            known_text = f"rules for {', '.join(known)}" if known else "no rules"
            raise ConfigError(
                f"{leaf.path}: the name '{name}' in the logical axes {names} has no rule and is "
                f"not a mesh axis ({', '.join(job_mesh.axis_sizes)}). There are {known_text}."
                f"{did_you_mean(name, (*known, *job_mesh.axis_sizes))} Add ('{name}', AXES) to "
                f"WeightSharding.logical_axis_rules, or ('{name}', None) to replicate the dim."
            )
        # Earlier rules may have split other dims of the weight already.
        merged = list(spec)
        for dim, axes in enumerate(split.spec):
            if axes is not None and spec[dim] is not None:
                raise ConfigError(
                    f"{leaf.path}: the name '{names[dim]}' splits dim {dim} over {axes}, but the "
                    f"spec {spec} already splits it over {spec[dim]}. Remove one of the splits."
                )
            merged[dim] = spec[dim] if axes is None else axes
        notes = list(split.dropped)
        if split.unmapped:
            notes.append(f"no rule for {', '.join(map(repr, split.unmapped))}")
        return Outcome(tuple(merged), note="; ".join(notes), by=", ".join(split.mapped))


def _check_axes(axis: Any, rule: Rule) -> None:
    names = (axis,) if isinstance(axis, str) else axis
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    expected = "the name of a mesh axis or a tuple of names"
    require(is_list and len(names) > 0, f"{rule_text(rule)}: the axis", axis, expected)
