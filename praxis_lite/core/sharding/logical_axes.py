"""Logical axis names: a model's names of its weights' dims, turned into mesh axes."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from praxis_lite.core.errors import ConfigError, did_you_mean, require

__all__ = ("MeshRules", "axes_of", "logical_to_mesh_axes")

MeshAxes = None | str | tuple[str, ...]
LogicalAxes = Sequence[None | str | tuple[str, ...]]
LogicalAxisRules = Sequence[tuple[str, MeshAxes]]


def axes_of(entry: MeshAxes | Iterable[str]) -> tuple[str, ...]:
    """Returns a dim's entry of a spec as a tuple of names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def entry_of(axes: tuple[str, ...]) -> MeshAxes:
    """Returns a tuple of names as a dim's entry of a spec: None, a name, or the tuple."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


@dataclasses.dataclass(frozen=True)
class NamedSplit:
    """What became of a weight's logical axes.

    Attributes:
      spec: mesh axes per dim: None, a name, or a tuple of names.
      mapped: a text 'name->axes' for each name that has mesh axes now.
      dropped: a sentence for each name whose mesh axes another dim has.
      unmapped: the names that no rule mentions.
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
    """Returns the mesh axes of dims that have names; Flax Linen's `nn.logical_to_mesh_axes`.

    Rules are gone through in their order. A rule counts if its name is one of the weight's and has
    no mesh axes yet, and if no other dim has any of the rule's axes; a later rule of the same name
    is the fallback. `(name, None)` settles that a name is not split.

    Args:
      logical_axes: a name, a tuple of names, or None per dim.
      rules: (name, mesh axes) pairs.
      axis_names: mesh axes; a name without a rule that is one of them stands for it, as in Flax
        NNX. In Linen no name does: ().
      taken: mesh axes that split the weight already.
      path: of the weight, for messages.

    Raises:
      ConfigError: a name comes twice.
    """
    names = [name for entry in logical_axes for name in axes_of(entry)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{path}: the logical axes {tuple(logical_axes)} have the name '{name}' twice. "
                "Give one of the dims another name, or None."
            )
    ruled = {name for name, _ in rules}
    by_themselves = [(name, name) for name in names if name in axis_names and name not in ruled]
    owners = dict.fromkeys(taken, "another dim")
    assigned: dict[str, tuple[str, ...]] = {}
    busy: dict[str, list[str]] = {}
    for name, entry in (*rules, *by_themselves):
        if name not in names or name in assigned:
            continue
        axes = axes_of(entry)
        held = [f"{axis} ({owners[axis]} has it)" for axis in axes if axis in owners]
        if held:
            busy.setdefault(name, []).extend(held)
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
            f"'{name}' does not get {', '.join(held)}"
            + (f", but {'+'.join(assigned[name]) or 'no axis'}" if name in assigned else "")
            for name, held in busy.items()
        ),
        unmapped=tuple(name for name in names if name not in assigned and name not in busy),
    )


def checked_rules(rules: Iterable, setting: str) -> tuple[tuple[str, MeshAxes], ...]:
    """Returns logical axis rules as tuples; a ConfigError names an entry that is no pair."""
    checked = []
    for rule in rules:
        is_pair = isinstance(rule, Sequence) and not isinstance(rule, str) and len(rule) == 2
        name, axes = rule if is_pair else (None, None)
        is_list = isinstance(axes, Sequence) and all(isinstance(axis, str) for axis in axes)
        require(
            isinstance(name, str) and (axes is None or is_list), f"{setting}: a rule", rule,
            "a pair of a logical axis's name and a mesh axis, a tuple of them, or None",
            "Write ('mlp', 'mdl'), for instance.",
        )
        checked.append((name, axes if axes is None or isinstance(axes, str) else tuple(axes)))
    return tuple(checked)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class MeshRules:
    """Mesh axes by the names a model uses for its dims, given to the model's constructor.

    `MeshRules(embed=None, mlp="mdl")("embed", "mlp")` is `(None, "mdl")`; the model passes the
    result where mesh axes are expected, as Flax's language model example (lm1b_nnx) does. Unlike
    rules of a job, it resolves names at once.
    """

    pairs: tuple[tuple[str, MeshAxes], ...]

    def __init__(self, **mesh_axes: MeshAxes | Sequence[str]):
        # Sorted tuples: an NNX module may hold this object as a static, so hashable, attribute.
        object.__setattr__(self, "pairs", checked_rules(sorted(mesh_axes.items()), "MeshRules"))

    def __call__(self, *names: str | None) -> tuple[MeshAxes, ...]:
        """Returns the mesh axes of each name; of None, None. Raises ConfigErrors on others."""
        mesh_axes = dict(self.pairs)
        for name in names:
            if name is not None and name not in mesh_axes:
                raise ConfigError(
                    f"MeshRules: the model asks for the mesh axes of '{name}', and there are those "
                    f"of {', '.join(mesh_axes) or 'none'}.{did_you_mean(name, mesh_axes)} Say "
                    f"MeshRules(..., {name}=AXES), or {name}=None for a dim that is not split."
                )
        return tuple(None if name is None else mesh_axes[name] for name in names)

    def __repr__(self) -> str:
        return f"MeshRules({', '.join(f'{name}={axes!r}' for name, axes in self.pairs)})"
