"""Visits, rewrites and evaluates jaxprs, for jax 0.10 to 0.12.

Callers provide a function for a single equation, and this module handles the jaxprs nested in
loops, branches and calls.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

__all__ = (
    "EXTRA_ROUNDS",
    "RECOMPUTED",
    "all_eqns",
    "array_type",
    "evaluate_jaxpr",
    "expand_high_level",
    "is_widening_cast",
    "open_jaxpr",
    "split_loop_operands",
)

# Name scope of operations that are recomputed by jax.checkpoint or by our custom backward passes.
RECOMPUTED = "rematted_computation"
# Name scope of the extra all-to-all rounds of a mixture of experts, which run only when expert
# loads are uneven. The number of rounds is not known at compile time.
EXTRA_ROUNDS = "extra_rounds_of_experts"


def open_jaxpr(jaxpr: Any) -> core.Jaxpr:
    """Returns the open jaxpr of a ClosedJaxpr; since jax 0.11, both are the same object."""
    opened: core.Jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    return opened


def expand_high_level(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Expands a high-level JAX primitive into a call to its jaxpr.

    With the flags jax_remat3, jax_custom_vjp3 and jax_custom_jvp3, JAX stores the operations of a
    remat or custom derivative in a Python object until compilation. The primitive that names values
    for jax.checkpoint policies is not expanded.
    """
    high_level = eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None
    if high_level is None or type(high_level).__name__ == "CheckpointName":
        return eqn
    expanded = jax.jit(lambda *args: eqn.primitive.to_lojax(*args, **eqn.params))
    (call,) = jax.make_jaxpr(expanded)(*(var.aval for var in eqn.invars)).eqns
    new: core.JaxprEqn = eqn.replace(primitive=call.primitive, params=call.params)
    return new


def all_eqns(eqns: Iterable[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
    """Yields all equations, each followed by the equations in its loops, branches and calls."""
    for eqn in map(expand_high_level, eqns):
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from all_eqns(inner.eqns)


def rewrite_jaxpr(jaxpr: Any, rule: Callable[[core.JaxprEqn], Iterable[core.JaxprEqn]]) -> Any:
    """Replaces each equation in a jaxpr with the equations that `rule` returns for it.

    Inner jaxprs are rewritten before the equation that contains them. An unchanged jaxpr is
    returned as the same object, and a jaxpr that is called twice is rewritten once.
    """
    # Maps id to (old, new). Storing the old jaxpr keeps its id from being reused.
    done: dict[int, tuple[core.Jaxpr, core.Jaxpr]] = {}

    def rewrite_param(value: Any) -> Any:
        if isinstance(value, tuple):  # The branches of a `cond`.
            new = tuple(map(rewrite_param, value))
            return value if _are_same(new, value) else new
        if not isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            return value
        opened = open_jaxpr(value)
        # A ClosedJaxpr is rewritten by rewriting the jaxpr that it contains.
        if isinstance(value, core.ClosedJaxpr) and opened is not value:
            inner = rewrite_param(opened)
            return value if inner is opened else value.replace(jaxpr=inner)
        if id(opened) not in done:
            eqns = [new for eqn in opened.eqns for new in apply_rule(eqn)]
            is_same = _are_same(eqns, opened.eqns)
            done[id(opened)] = opened, opened if is_same else opened.replace(eqns=eqns)
        return done[id(opened)][1]

    def apply_rule(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
        expanded = expand_high_level(eqn)
        new = list(rule(rewrite_inner(expanded)))
        return [eqn] if _are_same(new, [expanded]) else new

    def rewrite_inner(eqn: core.JaxprEqn) -> core.JaxprEqn:
        params = {name: rewrite_param(value) for name, value in eqn.params.items()}
        is_same = _are_same(params.values(), eqn.params.values())
        return eqn if is_same else eqn.replace(params=params)

    return rewrite_param(jaxpr)


def _are_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return list(map(id, new)) == list(map(id, old))


def evaluate_jaxpr(
    jaxpr: Any,
    arguments: Iterable[Any],
    rule: Callable[[core.JaxprEqn, list[Any]], Iterable[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, aval: None,
) -> list[Any]:
    """Evaluates a jaxpr on abstract values that the caller defines, such as sets of dependencies.

    Args:
      jaxpr: A Jaxpr or ClosedJaxpr.
      arguments: One value per input of the jaxpr.
      rule: Takes an equation and the values of its operands, and returns one value per result.
      constant: Takes a constant (or None if only its type is known) and its type, and returns a
        value.

    Returns:
      One value per output of the jaxpr.
    """
    inner = open_jaxpr(jaxpr)
    known = dict(zip(inner.invars, arguments, strict=True))
    # A Jaxpr, unlike a ClosedJaxpr, does not contain the values of its constants.
    consts = getattr(jaxpr, "consts", (None,) * len(inner.constvars))
    for var, value in zip(inner.constvars, consts, strict=True):
        known[var] = constant(value, var.aval)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [
            constant(atom.val, atom.aval) if isinstance(atom, core.Literal) else known[atom]
            for atom in atoms
        ]

    for eqn in map(expand_high_level, inner.eqns):
        known |= zip(eqn.outvars, rule(eqn, read(eqn.invars)), strict=True)
    return read(inner.outvars)


def split_loop_operands(
    eqn: core.JaxprEqn, operands: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Splits the operands of a loop by their role.

    Returns:
      (constants, initial carry, scanned arrays) for a scan, or (constants of the condition,
      constants of the body, initial carry) for a while loop.
    """
    params = eqn.params
    if eqn.primitive.name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
    elif "num_consts" in params:
        first, second = params["num_consts"], params["num_carry"]
    else:  # Newer jax versions, since about 0.11.
        first, second, _ = map(len, params["ft_in"].unpack())
    return operands[:first], operands[first : first + second], operands[first + second :]


def array_type(var: core.Var | core.Literal) -> Any:
    """Returns the ShapedArray (shape and dtype) of an array variable."""
    return var.aval


def is_widening_cast(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation casts floats to a wider type that represents them exactly."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = array_type(eqn.invars[0]).dtype, eqn.params["new_dtype"]
    are_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return bool(are_floats and old != new and jnp.promote_types(old, new) == new)
