"""Operations of a program, the loops that they stand in, and those that an output needs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from praxis_lite.core.jaxprs import opened

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


def cut(jaxpr: Any, outputs: Sequence[int]) -> Any:
    """Returns a closed jaxpr of these outputs alone, without operations that they do not need."""
    inner, kept = opened(jaxpr), []
    outvars = [inner.outvars[i] for i in outputs]
    needed = set(map(id, outvars))
    for eqn in reversed(inner.eqns):
        if not needed.isdisjoint(map(id, eqn.outvars)):
            kept.append(eqn)
            needed.update(map(id, eqn.invars))
    return jaxpr.replace(jaxpr=inner.replace(eqns=kept[::-1], outvars=outvars))
