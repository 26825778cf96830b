"""Evaluates a jaxpr operation by operation on custom values, with jax 0.10 to 0.12."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from praxis_lite.core.jaxprs import evaluate_jaxpr

# Primitives that only call another jaxpr.
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr",
}


class Interpreter:
    """Evaluates jaxprs. A subclass defines its values, and the results of an operation on them.

    Attributes:
      name_stack: the scopes of the current operation, as JAX writes them.
      tracebacks: those of the current operation and of the calls and loops around it, innermost
        first. JAX cuts each traceback off at the enclosing call.
    """

    def __init__(self):
        self.name_stack, self.tracebacks = "", ()

    def call(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr."""
        outer = self.name_stack, self.tracebacks

        def rule(eqn: Any, operands: list[Any]) -> list[Any]:
            self.name_stack = _joined(outer[0], str(eqn.source_info.name_stack))
            self.tracebacks = (eqn.source_info.traceback, *outer[1])
            with eqn.ctx.manager:
                results = self.results(eqn, operands)
            self.name_stack, self.tracebacks = outer
            return results

        return evaluate_jaxpr(jaxpr, values, rule, self.constant)

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
        """Returns the results of an operation that contains no other jaxpr, except for kernels."""
        raise NotImplementedError

    scan = while_loop = cond = shard_map = operation  # Override to evaluate their jaxprs by `call`.


def _joined(outer: str, inner: str) -> str:
    """Returns the scopes of a call followed by those of an operation inside it."""
    # A jaxpr that a custom_jvp calls repeats the scopes around it.
    if inner and f"/{outer}".endswith(f"/{inner}"):
        return outer
    return "/".join(part for part in (outer, inner) if part)


def mapped(
    eqn: Any, body: Callable[..., Any], more_in: Sequence[Any] = (), more_out: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Returns a shard_map with the mesh and specs of `eqn`, and another body.

    Args:
      body: takes the operands as one tuple, and further arguments with the specs `more_in`. Returns
        the results as one tuple, and further results with the specs `more_out`.
    """
    params = eqn.params
    return jax.shard_map(
        body, mesh=params["mesh"], in_specs=(tuple(params["in_specs"]), *more_in),
        out_specs=(tuple(params["out_specs"]), *more_out),
        axis_names=set(params["newly_manual_axes"]), check_vma=params["check_vma"],
    )


def bound(eqn: Any, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Binds an operation to arrays and returns its results, with other parameters if given."""
    params = eqn.params if params is None else params
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]
