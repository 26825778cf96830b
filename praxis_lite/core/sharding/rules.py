"""The four rules of Big Vision's `infer_sharding`, with its answers where it has any.

A rule takes an array's split so far and returns the next one. `strategies` chooses the rules of
each array (https://github.com/google-research/big_vision).
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
    """Checks that nothing splits the leaf: in a strategy it documents a replicated leaf."""

    def __call__(self, spec: Spec, leaf: Leaf, job_mesh: JobMesh) -> Outcome:
        if any(entry is not None for entry in spec):
            raise ConfigError(
                f"{leaf.path}: `replicate` wants it whole, but it is split as {spec} already. "
                "Remove one of the two."
            )
        return Outcome(spec)


@register_rule("fsdp")
@dataclasses.dataclass(frozen=True)
class Fsdp:
    """Splits the largest free dim that the devices divide; equal sizes: the last of them.

    With `allow_padding`, if the devices divide no free dim, it splits the largest free one that has
    an element for each device. A dim that counts layers is taken where no other will do.

    Attributes:
      axis: a mesh axis, or several, over which the one dim is split.
      min_size_to_shard_mb: a leaf of at most so many MiB stays whole.
      min_weight_size: in its place, a leaf of at most so many elements stays whole, as in the
        notebook on FSDP by shard_map, which has 2**18.
    """

    axis: str | Sequence[str]
    min_size_to_shard_mb: float = 4
    min_weight_size: int | None = None

    def __post_init__(self):
        _check_axes(self.axis, self)
        for size in (self.min_size_to_shard_mb, self.min_weight_size or 0):
            require(is_number(size), f"{rule_text(self)}: the size", size, "a number")

    def __call__(self, spec: Spec, leaf: Leaf, job_mesh: JobMesh) -> Outcome:
        axes = axes_of(self.axis)
        for axis in axes:
            if axis not in job_mesh.axis_sizes:
                names = tuple(job_mesh.axis_sizes)
                raise UnknownName(
                    f"{leaf.path}: {rule_text(self)} names the axis '{axis}', but the mesh has "
                    f"{names}.{did_you_mean(axis, names)} Fix the rule or mesh.axis_names."
                )
        num_shards = math.prod(job_mesh.axis_sizes[axis] for axis in axes)
        size, most = math.prod(leaf.shape), self.min_weight_size
        if most is None:
            size *= np.dtype(leaf.dtype).itemsize
            most = self.min_size_to_shard_mb * 2**20
        if size <= most:
            elements = self.min_weight_size
            limit = f"{self.min_size_to_shard_mb} MiB" if elements is None else f"{elements:,}"
            return Outcome(spec, skipped=f"size at most {limit}")
        # Not numpy.argsort: what it does with equal sizes depends on the processor.
        dims = sorted(range(len(spec)), key=lambda dim: (leaf.shape[dim], dim), reverse=True)
        for is_stacked in (False, True):
            same = [dim for dim in dims if (dim < leaf.num_stacked) == is_stacked]
            free = [dim for dim in same if spec[dim] is None]
            fit = [dim for dim in free if leaf.shape[dim] % num_shards == 0]
            if not fit and job_mesh.allow_padding:
                fit = [dim for dim in free if leaf.shape[dim] >= num_shards]
            if fit:
                return Outcome((*spec[: fit[0]], axes, *spec[fit[0] + 1 :]))
        expected = "has as many elements as" if job_mesh.allow_padding else "divides by"
        return Outcome(spec, note=f"no free dim {expected} the {num_shards} devices")


@register_rule("shard_dim")
@dataclasses.dataclass(frozen=True)
class ShardDim:
    """Splits a single dim.

    Attributes:
      axis: a mesh axis, or several.
      dim: which; negative: from the end. The first of n dims is 0, not -n, as in Big Vision.
      ignore_ndim_error: leave a leaf without that dim as it is, rather than raise.
    """

    axis: str | Sequence[str]
    dim: int
    ignore_ndim_error: bool = False

    def __post_init__(self):
        _check_axes(self.axis, self)
        is_integer = isinstance(self.dim, int) and not isinstance(self.dim, bool)
        require(is_integer, f"{rule_text(self)}: the dim", self.dim, "an integer")

    def __call__(self, spec: Spec, leaf: Leaf, job_mesh: JobMesh) -> Outcome:
        if abs(self.dim) >= len(spec):
            if self.ignore_ndim_error:
                return Outcome(spec, skipped=f"no dim {self.dim}")
            raise ConfigError(
                f"{leaf.path}: {rule_text(self)} does not fit its shape {leaf.shape}: the dim has "
                f"to be below {len(spec)} in absolute value. Let the pattern match fewer leaves, "
                "or say ignore_ndim_error=True."
            )
        dim = self.dim % len(spec)
        if spec[dim] is not None:
            raise ConfigError(
                f"{leaf.path}: {rule_text(self)} wants dim {dim}, which {spec[dim]} splits "
                f"already: its split is {spec}. Choose another dim, or remove one of the two."
            )
        return Outcome((*spec[:dim], axes_of(self.axis), *spec[dim + 1 :]))


@register_rule("logical_partitioning")
@dataclasses.dataclass(frozen=True)
class LogicalPartitioning:
    """Splits the dims with logical names that stand for mesh axes; see `logical_to_mesh_axes`.

    The rules are the leaf's own, then the job's; a name without a rule that is a mesh axis stands
    for it. A name whose mesh axes are taken is dropped, and reported.
    """

    def __call__(self, spec: Spec, leaf: Leaf, job_mesh: JobMesh) -> Outcome:
        if leaf.logical_axes is None:
            return Outcome(spec, skipped="no logical names")
        names = tuple(leaf.logical_axes)
        if len(names) > len(spec):
            raise ConfigError(
                f"{leaf.path}: it has {len(names)} logical axes {names}, but {len(spec)} dims: its "
                f"shape is {leaf.shape}. Remove {len(names) - len(spec)} of the names."
            )
        rules = (*leaf.logical_axis_rules, *job_mesh.logical_axis_rules)
        split = logical_to_mesh_axes(
            (*names, *(None,) * (len(spec) - len(names))), rules, axis_names=job_mesh.axis_sizes,
            taken=[axis for entry in spec for axis in axes_of(entry)], path=leaf.path,
        )
        if split.unmapped and job_mesh.unmapped_is_error:
            name, known = split.unmapped[0], dict(rules)
            raise ConfigError(
                f"{leaf.path}: the name '{name}' of its logical axes {names} has no rule, and is "
                f"not a mesh axis ({', '.join(job_mesh.axis_sizes)}). There are rules for "
                f"{', '.join(known) or 'no name'}."
                f"{did_you_mean(name, (*known, *job_mesh.axis_sizes))} Add ('{name}', AXES) to "
                "WeightSharding.logical_axis_rules, with None for AXES where it is not split."
            )
        merged = list(spec)
        for dim, axes in enumerate(split.spec):
            if axes is not None and spec[dim] is not None:
                raise ConfigError(
                    f"{leaf.path}: its name '{names[dim]}' wants dim {dim} for {axes}, which "
                    f"{spec[dim]} splits already: its split is {spec}. Remove one of the two."
                )
            merged[dim] = spec[dim] if axes is None else axes
        notes = list(split.dropped)
        if split.unmapped:
            notes.append(f"no rule for {', '.join(map(repr, split.unmapped))}")
        return Outcome(tuple(merged), note="; ".join(notes), by=", ".join(split.mapped))


def _check_axes(axis: Any, rule: Rule) -> None:
    names = (axis,) if isinstance(axis, str) else axis
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    expected = "a mesh axis's name or a tuple of names"
    require(is_list and len(names) > 0, f"{rule_text(rule)}: the axis", axis, expected)
