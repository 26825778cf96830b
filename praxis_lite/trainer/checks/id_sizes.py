"""Finds the valid range of the integers in a batch, by tracing how the task indexes with them.

A model looks up ids in an embedding table, and labels in the logits. JAX does not report ids that
are out of range: the lookup returns NaN or the last row, and a one-hot encoding is all zeros.
Therefore, the sizes of the indexed dims are read from the jaxpr, and batches are checked against
them.
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

# Primitives that return elements of their first operand unchanged.
_ELEMENT_PRESERVING = {
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "expand_dims",
    "transpose",
    "rev",
    "slice",
    "dynamic_slice",
    "copy",
    "convert_element_type",
    "stop_gradient",
    "sharding_constraint",
    "pvary",
}


def num_ids_of(task: Task, spec: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, int]:
    """Returns the number of valid ids for each integer leaf of a batch, where known.

    Args:
      task: The task; `Task.num_ids` takes precedence over the traced sizes.
      spec: Shapes and dtypes of an evaluation batch.
    """
    declared = dict(task.num_ids())
    integers = {name for name, leaf in spec.items() if _is_integer(leaf)} - declared.keys()
    if not integers:
        return declared
    traced = _traced_sizes(task, tuple(sorted(spec.items())))
    return declared | {name: traced[name] for name in sorted(integers & traced.keys())}


@functools.lru_cache(maxsize=16)
def _traced_sizes(task: Task, spec: tuple[tuple[str, jax.ShapeDtypeStruct], ...]) -> dict[str, int]:
    """Returns the size of the smallest dim indexed by each leaf in the task's eval step."""
    try:
        mdl_vars = abstract_mdl_vars(task.model.weight_specs())
        traced = jax.make_jaxpr(functools.partial(eval_step, task))(mdl_vars, dict(spec))
    except Exception:
        return {}  # This error is raised with setting names when the actual step is traced.
    leaves = jax.tree.leaves_with_path(dict(spec))
    names = [path[0].key if len(path) == 1 and _is_integer(leaf) else None for path, leaf in leaves]
    tracker = _IndexTracker()
    num_vars = len(traced.jaxpr.invars) - len(names)
    tracker.visit(traced.jaxpr, [*[None] * num_vars, *names])
    return tracker.sizes


def _is_integer(leaf: Any) -> bool:
    return getattr(getattr(leaf, "dtype", None), "kind", "") in ("i", "u")


@dataclasses.dataclass(frozen=True)
class _Shifted:
    """A leaf of the batch plus a constant."""

    name: str


class _IndexTracker:
    """Tracks the leaves of a batch through a jaxpr, as long as their values are unchanged.

    Each value in the jaxpr has a label. The label is the name of a leaf; a `_Shifted` leaf; a tuple
    of names for concatenated indices into several dims; an int n for an iota with n values along a
    dim; or None for any other value.

    Attributes:
      sizes: Size of the smallest dim that each leaf indexes, keyed by leaf name.
    """

    def __init__(self):
        self.sizes: dict[str, int] = {}

    def visit(self, jaxpr: Any, labels: Sequence[Any]) -> list[Any]:
        """Returns the labels of a jaxpr's results, given the labels of its arguments."""
        return evaluate_jaxpr(jaxpr, labels, self._result_labels)

    def _result_labels(self, eqn: Any, labels: list[Any]) -> list[Any]:
        primitive, unknown = eqn.primitive.name, [None] * len(eqn.outvars)
        if primitive == "iota":
            return [eqn.params["shape"][eqn.params["dimension"]]]
        if primitive == "optimization_barrier":
            return labels
        if primitive in _ELEMENT_PRESERVING and labels:
            return [labels[0], *unknown[1:]]
        # Probably x + n, which JAX selects below for negative indices.
        if primitive == "add" and isinstance(labels[0], str) and isinstance(eqn.invars[1], Literal):
            return [_Shifted(labels[0])]
        if primitive == "select_n":
            # JAX wraps negative indices by selecting between x and x + n.
            leaves = {label.name if isinstance(label, _Shifted) else label for label in labels[1:]}
            is_same = len(leaves) == 1 and leaves <= set(labels)
            return [leaves.pop() if is_same else None]
        # Indices into several dims, with an entry of the last dim for each.
        if primitive == "concatenate" and eqn.params["dimension"] == eqn.outvars[0].aval.ndim - 1:
            return [tuple(labels) if any(labels) else None]
        if primitive == "gather":
            self._add_gather(eqn, labels[1])
        elif primitive == "eq":
            self._add_comparison(labels)
        # Values may change in a loop, so they are not tracked through `while`.
        elif primitive != "while":
            return self._visit_inner(eqn, labels) or unknown
        return unknown

    def _add_gather(self, eqn: Any, index: Any) -> None:
        numbers = eqn.params["dimension_numbers"]
        dims, parts = numbers.start_index_map, index if isinstance(index, tuple) else (index,)
        # An explicit mode="clip" allows ids out of range. The gather for a `dynamic_slice` under
        # `jax.vmap` has this mode too, but does not collapse its dims.
        is_clipped = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP
        is_clipped = is_clipped and bool(numbers.collapsed_slice_dims)
        if len(parts) == len(dims) and not is_clipped:
            for name, dim in zip(parts, dims, strict=True):
                self._add(name, eqn.invars[0].aval.shape[dim])

    def _add_comparison(self, labels: Sequence[Any]) -> None:
        """Handles one-hot encoding, which compares a leaf with an iota."""
        for label, other in zip(labels, reversed(labels), strict=True):
            if isinstance(other, int):
                self._add(label, other)

    def _add(self, name: Any, size: int) -> None:
        if isinstance(name, str):
            self.sizes[name] = min(size, self.sizes.get(name, size))

    def _visit_inner(self, eqn: Any, labels: list[Any]) -> list[Any] | None:
        """Visits the jaxprs in an equation, and returns the result labels for a plain call."""
        primitive, results = eqn.primitive.name, None
        arguments = labels[1:] if primitive == "cond" else labels
        for inner in jaxprs_in_params(eqn.params):
            if len(inner.invars) == len(arguments):
                results = self.visit(inner, arguments)
        is_call = results is not None and len(results) == len(eqn.outvars)
        return results if is_call and primitive not in ("scan", "cond") else None
