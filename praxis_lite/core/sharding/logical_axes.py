"""Resolves the logical axis names of weight dims to mesh axes."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean, require

__all__ = ("MeshRules", "axes_of", "logical_to_mesh_axes")

MeshAxes = None | str | tuple[str, ...]
LogicalAxes = Sequence[None | str | tuple[str, ...]]
LogicalAxisRules = Sequence[tuple[str, MeshAxes]]


def axes_of(entry: MeshAxes | Iterable[str]) -> tuple[str, ...]:
    """Converts an entry of a PartitionSpec to a tuple of axis names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def entry_of(axes: tuple[str, ...]) -> MeshAxes:
    """Converts a tuple of axis names to a PartitionSpec entry: None, a name, or the tuple."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


@dataclasses.dataclass(frozen=True)
class NamedSplit:
    """The mesh axes over which the dims of a weight with logical axes are sharded.

    Attributes:
      spec: Mesh axes per dim: None, a name, or a tuple of names.
      mapped: "name->axes" for each name that was resolved to mesh axes.
      dropped: A message for each name whose mesh axes are already used by another dim.
      unmapped: Names without a rule.
    """

    spec: tuple[MeshAxes, ...]
    mapped: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    unmapped: tuple[str, ...] = ()


def logical_to_mesh_axes(
    logical_axes: LogicalAxes,
    rules: LogicalAxisRules,
    *,
    axis_names: Collection[str] = (),
    taken: Collection[str] = (),
    path: str = "logical axes",
) -> NamedSplit:
    """Resolves a weight's logical axes to mesh axes, like the Flax Linen function of the same name.

    Rules are applied in order. A rule applies if the weight uses the rule's name, the name is not
    resolved yet, and no other dim uses any of the rule's axes. Otherwise a later rule for the same
    name may apply. `(name, None)` leaves the dim with that name unsplit.

    Args:
      logical_axes: A name, a tuple of names, or None per dim.
      rules: (name, mesh axes) pairs.
      axis_names: Mesh axes that names without a rule may refer to directly, as in Flax NNX. Pass ()
        for Linen's behavior, where every name needs a rule.
      taken: Mesh axes that already split the weight.
      path: Path of the weight, for messages.

    Raises:
      ConfigError: `logical_axes` contain a name twice.
    """
    names = [name for entry in logical_axes for name in axes_of(entry)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{path}: the logical axes {tuple(logical_axes)} contain the name '{name}' twice. "
                "Give one of these dims a different name, or None."
            )
    # A name that is a mesh axis and has no rule refers to that axis.
    ruled = {name for name, _ in rules}
    implicit = [(name, name) for name in names if name in axis_names and name not in ruled]
    # `owners` maps each mesh axis in use to a description of the dim that uses it. `unavailable`
    # maps a name to the axes that its rules could not use.
    owners = dict.fromkeys(taken, "another dim")
    assigned: dict[str, tuple[str, ...]] = {}
    unavailable: dict[str, list[str]] = {}
    for name, entry in (*rules, *implicit):
        if name not in names or name in assigned:
            continue
        axes = axes_of(entry)
        in_use = [f"{axis} (used by {owners[axis]})" for axis in axes if axis in owners]
        if in_use:
            unavailable.setdefault(name, []).extend(in_use)
            continue
        assigned[name] = axes
        owners.update(dict.fromkeys(axes, f"'{name}'"))
    return NamedSplit(
        spec=tuple(
            entry_of(tuple(axis for name in axes_of(dim) for axis in assigned.get(name, ())))
            for dim in logical_axes
        ),
        mapped=tuple(f"{name}->{'+'.join(assigned[name])}" for name in names if assigned.get(name)),
        dropped=tuple(
            f"'{name}' cannot use {', '.join(in_use)}"
            + (f", so it uses {'+'.join(assigned[name]) or 'no axis'}" if name in assigned else "")
            for name, in_use in unavailable.items()
        ),
        unmapped=tuple(name for name in names if name not in assigned and name not in unavailable),
    )


def checked_rules(rules: Iterable[Any], setting: str) -> tuple[tuple[str, MeshAxes], ...]:
    """Returns logical axis rules as tuples; raises ConfigError if an entry is not a pair."""
    checked: list[tuple[str, MeshAxes]] = []
    for rule in rules:
        is_pair = isinstance(rule, Sequence) and not isinstance(rule, str) and len(rule) == 2
        pair: Sequence[Any] = rule if is_pair else (None, None)
        name, axes = pair
        is_list = isinstance(axes, Sequence) and all(isinstance(axis, str) for axis in axes)
        require(
            isinstance(name, str) and (axes is None or is_list),
            f"{setting}: a rule",
            rule,
            "a pair of a logical axis name and a mesh axis, a tuple of mesh axes, or None",
            "For example, use ('mlp', 'mdl').",
        )
        checked.append((name, axes if axes is None or isinstance(axes, str) else tuple(axes)))
    return tuple(checked)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class MeshRules:
    """Maps a model's dim names to mesh axes; passed to the constructor of the model.

    The model calls this object to get mesh axes, as in Flax's language model example (lm1b_nnx):
    `MeshRules(embed=None, mlp="mdl")("embed", "mlp")` returns `(None, "mdl")`. Unlike the logical
    axis rules of a job, MeshRules resolves names immediately.
    """

    pairs: tuple[tuple[str, MeshAxes], ...]

    def __init__(self, **mesh_axes: MeshAxes | Sequence[str]):
        # Sorted tuples, because an NNX module may store this object as a static attribute.
        object.__setattr__(self, "pairs", checked_rules(sorted(mesh_axes.items()), "MeshRules"))

    def __call__(self, *names: str | None) -> tuple[MeshAxes, ...]:
        """Returns the mesh axes for each name, or None for None.

        Raises:
          ConfigError: A name has no mesh axes.
        """
        mesh_axes = dict(self.pairs)
        for name in names:
            if name is not None and name not in mesh_axes:
                raise ConfigError(
                    f"MeshRules: the model uses the name '{name}', but the rules have "
                    f"{', '.join(mesh_axes) or 'no names'}.{did_you_mean(name, mesh_axes)} Use "
                    f"MeshRules(..., {name}=AXES), or {name}=None for a dim that is not split."
                )
        return tuple(None if name is None else mesh_axes[name] for name in names)

    def __repr__(self) -> str:
        return f"MeshRules({', '.join(f'{name}={axes!r}' for name, axes in self.pairs)})"
