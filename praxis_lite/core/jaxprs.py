"""Programs as JAX writes them (jaxprs): walked, rewritten and followed, from jax 0.10 to 0.12.

Callers specify what to do with an operation; this file knows how programs are nested in loops,
branches and calls.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

__all__ = (
    "FURTHER_TURNS", "RECOMPUTED", "followed", "of_loop", "opened", "plain", "widens", "with_inner",
)

# The scope, in names of operations, of what is computed again: by jax.checkpoint, and by our own
# backward passes.
RECOMPUTED = "rematted_computation"
# Of a loop of unknown length whose turns even loads lack: of an exchange of tokens between experts.
FURTHER_TURNS = "further_turns_of_experts"


def opened(jaxpr: Any) -> core.Jaxpr:
    """Returns a jaxpr without its constants' values; from jax 0.11 it is the jaxpr itself."""
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def plain(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Returns an operation, or a call of the operations that it stands for.

    With jax_remat3, jax_custom_vjp3 and jax_custom_jvp3 those are in a Python object, and JAX
    unfolds it only when it compiles. A name for a policy of jax.checkpoint stays.
    """
    of_python = eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None
    if of_python is None or type(of_python).__name__ == "CheckpointName":
        return eqn
    unfolded = jax.jit(lambda *args: eqn.primitive.to_lojax(*args, **eqn.params))
    (call,) = jax.make_jaxpr(unfolded)(*(var.aval for var in eqn.invars)).eqns
    return eqn.replace(primitive=call.primitive, params=call.params)


def with_inner(eqns: Iterable[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
    """Yields operations, and those of their loops, branches and calls."""
    for eqn in map(plain, eqns):
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from with_inner(inner.eqns)


def rewritten(jaxpr: Any, rule: Callable[[core.JaxprEqn], Iterable[core.JaxprEqn]]) -> Any:
    """Returns a program with each operation replaced by those that `rule` returns for it.

    `rule` is given an operation whose own programs are rewritten already. A program that does not
    change is the very same, and one that is called twice stays one.
    """
    done: dict[int, tuple[core.Jaxpr, core.Jaxpr]] = {}  # With the old ones, whose ids they are.

    def of_value(value: Any) -> Any:
        if isinstance(value, tuple):  # The branches of a condition.
            new = tuple(map(of_value, value))
            return value if _are_same(new, value) else new
        if not isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            return value
        if opened(value) is not value:
            inner = of_value(value.jaxpr)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        if id(value) not in done:
            eqns = [new for eqn in value.eqns for new in replaced(eqn)]
            is_same = _are_same(eqns, value.eqns)
            done[id(value)] = value, value if is_same else value.replace(eqns=eqns)
        return done[id(value)][1]

    def replaced(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
        unfolded = plain(eqn)
        new = list(rule(of_equation(unfolded)))
        return [eqn] if _are_same(new, [unfolded]) else new

    def of_equation(eqn: core.JaxprEqn) -> core.JaxprEqn:
        params = {name: of_value(value) for name, value in eqn.params.items()}
        is_same = _are_same(params.values(), eqn.params.values())
        return eqn if is_same else eqn.replace(params=params)

    return of_value(jaxpr)


def _are_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return list(map(id, new)) == list(map(id, old))


def followed(
    jaxpr: Any, arguments: Iterable[Any], rule: Callable[[core.JaxprEqn, list[Any]], Iterable[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, aval: None,
) -> list[Any]:
    """Evaluates a program on custom values: those of its arguments, and those that `rule` returns.

    Args:
      rule: returns the results of an operation, given the values of its operands.
      constant: returns the value of a constant, given it (None if only its type is known) and
        its type.
    """
    inner = opened(jaxpr)
    known = dict(zip(inner.invars, arguments, strict=True))
    consts = getattr(jaxpr, "consts", (None,) * len(inner.constvars))
    for var, value in zip(inner.constvars, consts, strict=True):
        known[var] = constant(value, var.aval)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [
            constant(atom.val, atom.aval) if isinstance(atom, core.Literal) else known[atom]
            for atom in atoms
        ]

    for eqn in map(plain, inner.eqns):
        known |= zip(eqn.outvars, rule(eqn, read(eqn.invars)), strict=True)
    return read(inner.outvars)


def of_loop(eqn: core.JaxprEqn, operands: Sequence[Any]) -> tuple[Sequence, Sequence, Sequence]:
    """Returns of a scan constants, carry, arrays; of a while loop its two sorts of them, carry."""
    params = eqn.params
    if eqn.primitive.name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
    elif "num_consts" in params:
        first, second = params["num_consts"], params["num_carry"]
    else:  # From jax 0.11 or so.
        first, second, _ = map(len, params["ft_in"].unpack())
    return operands[:first], operands[first : first + second], operands[first + second :]


def widens(eqn: core.JaxprEqn) -> bool:
    """Returns True if an operation casts floats to another type that holds all of them."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    are_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return are_floats and old != new and jnp.promote_types(old, new) == new
