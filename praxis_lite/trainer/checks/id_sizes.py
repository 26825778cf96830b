"""How many ids a batch's integers may be, read off the program that uses them.

A model of any kind looks its ids up in a table, and its labels up among its logits. JAX gives NaN
or the last row for an id beyond them, and a one-hot row of zeros for such a label, without a word.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, jaxprs_in_params

from praxis_lite.core.jaxprs import evaluate_jaxpr
from praxis_lite.core.models.model import abstract_mdl_vars
from praxis_lite.core.partitioner.steps import eval_step
from praxis_lite.core.task import Task

# Their result has just the numbers of their first operand, or some of them.
_SAME = {
    "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "rev", "slice",
    "dynamic_slice", "copy", "convert_element_type", "stop_gradient", "sharding_constraint",
    "optimization_barrier", "pvary",
}


def num_ids_of(task: Task, spec: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, int]:
    """Returns how many ids there are by a leaf's name: as the task says, else as it uses them.

    Args:
      spec: of a batch for an evaluation.
    """
    known = dict(task.num_ids())
    integers = {name for name, leaf in spec.items() if _is_integer(leaf)} - known.keys()
    if not integers:
        return known
    result = _traced(task, tuple(sorted(spec.items())))
    return known | {name: result[name] for name in sorted(integers & result.keys())}


@functools.lru_cache(maxsize=16)
def _traced(task: Task, spec: tuple[tuple[str, jax.ShapeDtypeStruct], ...]) -> dict[str, int]:
    try:
        mdl_vars = abstract_mdl_vars(task.model.weight_specs())
        traced = jax.make_jaxpr(functools.partial(eval_step, task))(mdl_vars, dict(spec))
    except Exception:
        return {}  # What is wrong with the step, its own trace says, with the names of settings.
    leaves = jax.tree.leaves_with_path(dict(spec))
    names = [
        path[0].key if len(path) == 1 and _is_integer(leaf) else None for path, leaf in leaves
    ]
    reader = _Reader()
    num_vars = len(traced.jaxpr.invars) - len(names)
    reader.read(traced.jaxpr, [*[None] * num_vars, *names])
    return reader.sizes


def _is_integer(leaf: Any) -> bool:
    return getattr(getattr(leaf, "dtype", None), "kind", "") in ("i", "u")


@dataclasses.dataclass(frozen=True)
class _Shifted:
    """A leaf with a number added."""

    name: str


class _Reader:
    """Follows leaves of a batch through a program, as long as they stay the numbers that they are.

    Attributes:
      sizes: the smallest dim that each is an index into, by its name.
    """

    def __init__(self):
        self.sizes: dict[str, int] = {}

    def read(self, jaxpr: Any, given: Sequence[Any]) -> list[Any]:
        """Returns the names of the results that are leaves as they came, else None.

        A tuple of names stands for indices of several dims, side by side; an int for the numbers
        0, 1, 2, ... below it.
        """
        return evaluate_jaxpr(jaxpr, given, self._results)

    def _results(self, eqn: Any, names: list[Any]) -> list[Any]:
        kind, nothing = eqn.primitive.name, [None] * len(eqn.outvars)
        if kind == "iota":
            return [eqn.params["shape"][eqn.params["dimension"]]]
        if kind in _SAME and names:
            return [names[0], *nothing[1:]]
        if kind == "add" and isinstance(names[0], str) and isinstance(eqn.invars[1], Literal):
            return [_Shifted(names[0])]
        if kind == "select_n":
            # An index below 0 counts from the end: x + n in place of x.
            ways = {way.name if isinstance(way, _Shifted) else way for way in names[1:]}
            is_same = len(ways) == 1 and ways <= set(names)
            return [ways.pop() if is_same else None]
        if kind == "concatenate" and eqn.params["dimension"] == eqn.outvars[0].aval.ndim - 1:
            return [tuple(names) if any(names) else None]
        if kind == "gather":
            self._look_up(eqn, names[1])
        elif kind == "eq":
            self._compare(names)
        elif kind != "while":
            return self._read_within(eqn, names) or nothing
        return nothing

    def _look_up(self, eqn: Any, index: Any) -> None:
        numbers = eqn.params["dimension_numbers"]
        dims, parts = numbers.start_index_map, index if isinstance(index, tuple) else (index,)
        # Who says mode="clip" means it. Under `jax.vmap` the index of a single row comes so
        # unasked, as the slice that it was, whose dims are not collapsed.
        is_clipped = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP
        is_clipped = is_clipped and bool(numbers.collapsed_slice_dims)
        if len(parts) == len(dims) and not is_clipped:
            for name, dim in zip(parts, dims, strict=True):
                self._add(name, eqn.invars[0].aval.shape[dim])

    def _compare(self, names: Sequence[Any]) -> None:
        """A leaf that is compared with 0, 1, 2, ... becomes a row of a single True."""
        for name, other in zip(names, reversed(names), strict=True):
            if isinstance(other, int):
                self._add(name, other)

    def _add(self, name: Any, size: int) -> None:
        if isinstance(name, str):
            self.sizes[name] = min(size, self.sizes.get(name, size))

    def _read_within(self, eqn: Any, names: list[Any]) -> list[Any] | None:
        """Goes on in the programs that an operation runs; returns the results of a mere call."""
        kind, results = eqn.primitive.name, None
        given = names[1:] if kind == "cond" else names
        for inner in jaxprs_in_params(eqn.params):
            if len(inner.invars) == len(given):
                results = self.read(inner, given)
        is_call = results is not None and len(results) == len(eqn.outvars)
        return results if is_call and kind not in ("scan", "cond") else None
