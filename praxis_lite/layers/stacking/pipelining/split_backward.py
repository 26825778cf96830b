"""Splits a function into one for the results that are needed first, and one for the others.

A split backward pass first computes the gradient with respect to its inputs, because the previous
stage is waiting for that gradient, and later computes the weight gradients (zero bubble,
arXiv:2401.10241). No operation runs in both functions.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

from praxis_lite.core.jaxprs import all_eqns, expand_high_level, open_jaxpr

PyTree = Any

# Primitives that only call a jaxpr; they are inlined and split. Loops are not split.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")


@dataclasses.dataclass(frozen=True)
class SplitFunction:
    """A function that has been split into two.

    Attributes:
      first: Takes the arguments, and returns (results needed first, residuals for `second`).
      second: Takes the residuals and the leading arguments, and returns the other results.
      manual_axes: Mesh axes that are manual in every `jax.shard_map` of the function; None if it
        contains no `jax.shard_map`.
    """

    first: Callable[..., tuple[PyTree, list[jax.Array]]]
    second: Callable[..., PyTree]
    manual_axes: frozenset[str] | None


def split_function(
    function: Callable[..., tuple[PyTree, PyTree]], args: Sequence[PyTree], num_shared: int
) -> SplitFunction:
    """Splits a function that returns (results needed first, other results).

    The function is traced. Equations that the first results depend on go to `first`, and all other
    equations to `second`. Values from `first` that `second` uses are residuals.

    Args:
      function: The function to split.
      args: Arguments to trace the function with: arrays or `jax.ShapeDtypeStruct`s.
      num_shared: Number of leading arguments that `second` takes as well, so that they need not be
        saved as residuals.
    """
    # Trace the function, and inline calls, so that their equations can be assigned separately.
    closed, results = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = open_jaxpr(closed)
    constants = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    eqns: list[core.JaxprEqn] = []
    outvars = _inline_calls(closed, jaxpr.invars, eqns, constants)
    # `first` gets the equations that its results need; `second` gets those that remain.
    num_first = len(jax.tree.leaves(results[0]))
    first_outvars, second_outvars = outvars[:num_first], outvars[num_first:]
    first_eqns = _needed_eqns(eqns, first_outvars)
    first_ids = set(map(id, first_eqns))
    second_eqns = _needed_eqns([eqn for eqn in eqns if id(eqn) not in first_ids], second_outvars)
    # Residuals are the values that `second` reads but neither receives as an argument nor computes.
    shared_vars = jaxpr.invars[: len(jax.tree.leaves(list(args[:num_shared])))]
    known = {*shared_vars, *constants, *(var for eqn in second_eqns for var in eqn.outvars)}
    used = [*(atom for eqn in second_eqns for atom in eqn.invars), *second_outvars]
    residuals = list(
        dict.fromkeys(
            atom for atom in used if not isinstance(atom, core.Literal) and atom not in known
        )
    )
    first_tree, second_tree = map(jax.tree.structure, results)

    def first(*args: PyTree) -> tuple[PyTree, list[jax.Array]]:
        values = constants | dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        actual = _evaluate(first_eqns, values, [*first_outvars, *residuals])
        return jax.tree.unflatten(first_tree, actual[:num_first]), actual[num_first:]

    def second(arrays: list[jax.Array], *args: PyTree) -> PyTree:
        values = constants | dict(zip(shared_vars, jax.tree.leaves(args), strict=True))
        values |= zip(residuals, arrays, strict=True)
        actual = _evaluate(second_eqns, values, second_outvars)
        return jax.tree.unflatten(second_tree, actual)

    return SplitFunction(first, second, _common_manual_axes(eqns))


def used_arguments(function: Callable[..., PyTree], args: Sequence[PyTree]) -> list[bool]:
    """Returns, for each leaf in the arguments, whether the function's results depend on it."""
    closed = jax.make_jaxpr(function)(*args)
    eqns: list[core.JaxprEqn] = []
    outvars = _inline_calls(closed, open_jaxpr(closed).invars, eqns, {})
    used = {atom for atom in outvars if not isinstance(atom, core.Literal)}
    for eqn in _needed_eqns(eqns, outvars):
        used |= {atom for atom in eqn.invars if not isinstance(atom, core.Literal)}
    return [var in used for var in open_jaxpr(closed).invars]


def _common_manual_axes(eqns: Iterable[core.JaxprEqn]) -> frozenset[str] | None:
    """Returns the axes that are manual in every `shard_map`, or None without any `shard_map`."""
    manual_axes = []
    for eqn in all_eqns(eqns):
        if eqn.primitive.name == "shard_map":
            name = next(name for name in eqn.params if name.endswith("manual_axes"))
            manual_axes.append(frozenset(eqn.params[name]))
    return frozenset.intersection(*manual_axes) if manual_axes else None


def _inline_calls(
    closed: Any, arguments: Sequence[Any], eqns: list[core.JaxprEqn], constants: dict
) -> list[Any]:
    """Appends a jaxpr's equations to `eqns` with calls inlined; returns its output variables."""
    jaxpr = open_jaxpr(closed)
    names = dict(zip(jaxpr.invars, arguments, strict=True))
    for var, value in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
        constants[var] = value

    def rename(atoms: Iterable[Any]) -> list[Any]:
        return [atom if isinstance(atom, core.Literal) else names.get(atom, atom) for atom in atoms]

    for eqn in map(expand_high_level, jaxpr.eqns):
        invars = rename(eqn.invars)
        if eqn.primitive.name in _CALLS and "jaxpr" in eqn.params:
            outvars = _inline_calls(eqn.params["jaxpr"], invars, eqns, constants)
        else:
            # New variables, because a jaxpr may be called twice.
            outvars = [core.Var(var.aval) for var in eqn.outvars]
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
        names |= zip(eqn.outvars, outvars, strict=True)
    return rename(jaxpr.outvars)


def _needed_eqns(eqns: Sequence[core.JaxprEqn], atoms: Iterable[Any]) -> list[core.JaxprEqn]:
    """Returns the equations needed to compute `atoms`, in their original order."""
    needed = {atom for atom in atoms if not isinstance(atom, core.Literal)}
    used = []
    # An equation is needed if one of its results is in `atoms` or is read by a later needed
    # equation.
    for eqn in reversed(eqns):
        if needed.intersection(eqn.outvars):
            needed |= {atom for atom in eqn.invars if not isinstance(atom, core.Literal)}
            used.append(eqn)
    return used[::-1]


def _evaluate(eqns: Sequence[core.JaxprEqn], values: dict, atoms: Sequence[Any]) -> list[Any]:
    """Evaluates the equations, and returns the values of `atoms`."""
    values = dict(values)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in atoms]

    for eqn in eqns:
        scope = str(eqn.source_info.name_stack)
        with eqn.ctx.manager, jax.named_scope(scope):
            params = eqn.primitive.get_bind_params(eqn.params)
            results = eqn.primitive.bind(*read(eqn.invars), **params)
        results = results if eqn.primitive.multiple_results else [results]
        values |= zip(eqn.outvars, results, strict=True)
    return read(atoms)
