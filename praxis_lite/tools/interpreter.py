"""A program run operation by operation, from jax 0.10 to 0.12, in values of a user's own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from praxis_lite.core.jaxprs import followed

# Operations that call another program, and run it as it is.
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr",
}


class Interpreter:
    """Runs programs; a subclass says what its values are, and what an operation makes of them.

    Attributes:
      name_stack: the scopes around the operation that is run, as JAX writes them.
      tracebacks: of where it is written and of the calls and loops around it, innermost first;
        JAX cuts each off at the call around it.
    """

    def __init__(self):
        self.name_stack, self.tracebacks = "", ()

    def call(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """Returns the results of a program."""
        around = self.name_stack, self.tracebacks

        def rule(eqn: Any, operands: list[Any]) -> list[Any]:
            self.name_stack = _joined(around[0], str(eqn.source_info.name_stack))
            self.tracebacks = (eqn.source_info.traceback, *around[1])
            with eqn.ctx.manager:
                results = self.results(eqn, operands)
            self.name_stack, self.tracebacks = around
            return results

        return followed(jaxpr, values, rule, self.constant)

    def results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Returns the results of an operation of any kind."""
        name = eqn.primitive.name
        if name in CALLS:
            return self.call(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], operands)
        rule = {
            "scan": self.scan, "while": self.while_loop, "cond": self.cond,
            "shard_map": self.shard_map,
        }.get(name, self.operation)
        return rule(eqn, operands)

    def constant(self, value: Any, aval: Any) -> Any:
        """Returns the value of a constant."""
        raise NotImplementedError

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Returns the results of an operation that runs no other program, or only as a kernel."""
        raise NotImplementedError

    scan = while_loop = cond = shard_map = operation  # These run their programs with `call`.


def _joined(around: str, inside: str) -> str:
    """Returns the scopes of an operation inside a call, with those of the call before them."""
    # A program that a custom_jvp calls repeats the scopes around it.
    if inside and f"/{around}".endswith(f"/{inside}"):
        return around
    return "/".join(part for part in (around, inside) if part)


def mapped(
    eqn: Any, body: Callable[..., Any], more_in: Sequence[Any] = (), more_out: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Returns a shard_map like that of `eqn`, of another body.

    Args:
      body: takes the operands as one tuple, and arguments of the specs `more_in`; returns a tuple
        of the results, and results of the specs `more_out`.
    """
    params = eqn.params
    return jax.shard_map(
        body, mesh=params["mesh"], in_specs=(tuple(params["in_specs"]), *more_in),
        out_specs=(tuple(params["out_specs"]), *more_out),
        axis_names=set(params["newly_manual_axes"]), check_vma=params["check_vma"],
    )


def bound(eqn: Any, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Returns the results of an operation of arrays, with other parameters if given."""
    params = eqn.params if params is None else params
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]
