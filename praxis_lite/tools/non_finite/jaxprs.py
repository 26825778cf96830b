"""A program as JAX writes it (a jaxpr), read alike from jax 0.10 to 0.12."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

# Operations that call another program, and run it as it is.
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr",
}
# Under shard_map these bring a device the numbers of others.
COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
    "all_gather_reduced", "all_to_all", "ragged_all_to_all", "ppermute", "reduce_scatter",
    "unreduced_psum", "unreduced_reduce_scatter",
}
# Their result has just the numbers of their one operand.
SAME_NUMBERS = {
    "reshape", "transpose", "broadcast_in_dim", "neg", "abs", "copy", "copy_p", "squeeze", "rev",
    "expand_dims", "name", "stop_gradient", "sharding_constraint", "pvary", "layout_constraint",
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around an operation: where it is written, and its length, or None if unknown."""

    name_stack: str
    tracebacks: tuple[Any, ...]
    length: int | None
    is_reversed: bool = False


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a program, or an argument of it.

    Attributes:
      primitive: its name in JAX, such as "log".
      name_stack: the scopes that it stands in, as JAX writes them.
      tracebacks: of where it is written and of the calls and loops around it, innermost first;
        JAX cuts each off at the call around it.
      loops: those around it, outermost first.
      argument: the index of an argument, or None.
    """

    primitive: str
    name_stack: str = ""
    tracebacks: tuple[Any, ...] = ()
    loops: tuple[Loop, ...] = ()
    argument: int | None = None


def opened(jaxpr: Any) -> Any:
    """Returns a jaxpr without the values of its constants, if it has them."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def num_equations(jaxpr: Any) -> int:
    """Returns how many operations a program has, with those of its loops, branches and calls."""
    return sum(1 + sum(map(num_equations, inner_programs(one))) for one in opened(jaxpr).eqns)


def inner_programs(equation: Any) -> Iterator[Any]:
    """Yields the programs that an operation runs: of a loop, of branches, of a call."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(opened(one), "eqns"):
                yield one


def needed(equations: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Returns the operations that these outputs depend on."""
    wanted, kept = {v for v in outvars if not hasattr(v, "val")}, []
    for one in reversed(equations):
        if not wanted.isdisjoint(one.outvars):
            kept.append(one)
            wanted |= {v for v in one.invars if not hasattr(v, "val")}
    return kept[::-1]


def joined(around: str, inside: str) -> str:
    """Returns the scopes of an operation inside a call, with those of the call before them."""
    # A program that a custom_jvp calls repeats the scopes around it.
    if inside and f"/{around}".endswith(f"/{inside}"):
        return around
    return "/".join(part for part in (around, inside) if part)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants of its body, and how many its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    num_consts, num_carry, _ = map(len, params["ft_in"].unpack())  # From jax 0.11 or so.
    return num_consts, num_carry


def only_widens(one: Any) -> bool:
    """Returns True if an operation turns floats into a type that holds all of them."""
    if one.primitive.name != "convert_element_type":
        return False
    old, new = one.invars[0].aval.dtype, one.params["new_dtype"]
    if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
        return False
    return jnp.promote_types(old, new) == new
