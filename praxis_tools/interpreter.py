"""Evaluates jaxprs operation by operation on custom values (jax 0.10 to 0.12)."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax

from praxis_lite.core.jaxprs import evaluate_jaxpr

# Primitives that only call another jaxpr.
CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "remat",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "eval_jaxpr",
}


class Interpreter(abc.ABC):
    """Base class for jaxpr interpreters; subclasses define the values and the operations on them.

    Attributes:
      name_stack: Scopes of the current operation, as JAX formats them.
      tracebacks: Tracebacks of the current operation and of the calls and loops around it,
        innermost first. JAX truncates each traceback at the enclosing call.
    """

    def __init__(self) -> None:
        self.name_stack = ""
        self.tracebacks: tuple[Any, ...] = ()

    def call(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr and returns its results."""
        outer = self.name_stack, self.tracebacks

        def rule(eqn: Any, operands: list[Any]) -> list[Any]:
            self.name_stack = _join_scopes(outer[0], str(eqn.source_info.name_stack))
            self.tracebacks = (eqn.source_info.traceback, *outer[1])
            with eqn.ctx.manager:
                results = self.results(eqn, operands)
            self.name_stack, self.tracebacks = outer
            return results

        return evaluate_jaxpr(jaxpr, values, rule, self.constant)

    def results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Evaluates an equation of any kind and returns its results."""
        name = eqn.primitive.name
        if name in CALLS:
            return self.call(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], operands)
        rule = {
            "scan": self.scan,
            "while": self.while_loop,
            "cond": self.cond,
            "shard_map": self.shard_map,
        }.get(name, self.operation)
        return rule(eqn, operands)

    @abc.abstractmethod
    def constant(self, value: Any, aval: Any) -> Any:
        """Converts a jaxpr constant to a value."""

    @abc.abstractmethod
    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Evaluates a kernel or an equation without an inner jaxpr, and returns its results."""

    # Subclasses evaluate the inner jaxprs of these equations with `call`.
    scan = while_loop = cond = shard_map = operation


def _join_scopes(outer: str, inner: str) -> str:
    """Joins the scopes of a call with the scopes of an operation inside the call."""
    # The jaxpr of a custom_jvp repeats the scopes around the call.
    if inner and f"/{outer}".endswith(f"/{inner}"):
        return outer
    return "/".join(part for part in (outer, inner) if part)


def run_shard_map(
    eqn: Any,
    body: Callable[..., Any],
    extra_in_specs: Sequence[Any] = (),
    extra_out_specs: Sequence[Any] = (),
) -> Callable[..., Any]:
    """Returns a shard_map with the mesh and specs of an equation, but with a new body.

    Args:
      eqn: Equation of a shard_map.
      body: Function that takes the operands as one tuple followed by extra arguments, and returns
        the results as one tuple followed by extra results.
      extra_in_specs: Specs of the extra arguments.
      extra_out_specs: Specs of the extra results.
    """
    params = eqn.params
    return jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(tuple(params["in_specs"]), *extra_in_specs),
        out_specs=(tuple(params["out_specs"]), *extra_out_specs),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )


def bind(eqn: Any, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Runs the primitive of an equation on arrays and returns its results.

    Args:
      eqn: The equation.
      operands: Arrays to run the primitive on.
      params: Parameters for the primitive. If None, the equation's parameters are used.
    """
    params = eqn.params if params is None else params
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]
