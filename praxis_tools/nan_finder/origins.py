"""Finds the operation that produced the first NaN or infinity in a jaxpr.

Numbers that a select discards, such as masked attention scores, are not reported.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.core.jaxprs import all_eqns, open_jaxpr
from praxis_tools.nan_finder.tags import (
    CONSTANT,
    ELSEWHERE,
    NUM_WHILE_ITERATIONS,
    Operation,
    TaggedRun,
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a non-finite number.

    Attributes:
      operation: The operation that produced the number, or None for a constant in the jaxpr.
      iterations: Index of the iteration in each loop around the operation, or None if unknown.
    """

    operation: Operation | None
    iterations: tuple[int | None, ...] = ()


class OriginSearch:
    """Evaluates a jaxpr and finds the origins of non-finite numbers in some of its outputs.

    Args:
      jaxpr: The closed jaxpr, such as `jax.jit(function).trace(...).jaxpr`.
      outputs: Indices of the outputs to check. Operations that do not affect these outputs are
        removed.
      replicated: A replicated sharding, with which every process can read the results, or None for
        a single process.
    """

    def __init__(
        self,
        jaxpr: Any,
        outputs: Sequence[int],
        replicated: jax.sharding.NamedSharding | None = None,
    ):
        self._jaxpr = _pruned(jaxpr, outputs)
        self._run = jax.jit(self._traced, out_shardings=replicated)

    def __call__(self, args: Sequence[jax.Array], *, only_nan: bool) -> list[Origin | None]:
        """Returns the origin of the first non-finite number in each output; None if all are finite.

        Args:
          args: Flat arguments of the jaxpr, which are not donated.
          only_nan: Whether to ignore infinities and find the origin of the first NaN.
        """
        tags = jax.device_get(self._run(np.bool_(not only_nan), np.bool_(False), *args))
        return [self._origin(int(tag)) for tag in tags]

    def _traced(self, infinities_count: jax.Array, never: jax.Array, *args: jax.Array) -> list:
        # Reserve twice the number of operations, because JAX may trace the body of a loop twice.
        num_operations = 2 * (len(args) + sum(1 for _ in all_eqns(self._jaxpr.eqns))) + 1
        self._num_iterations = int(CONSTANT) // num_operations
        run = TaggedRun(self._num_iterations, infinities_count, never)
        self._operations = run.operations
        tags = [run.argument_tag(index, x) for index, x in enumerate(args)]
        return [tag for _, tag in run.call(self._jaxpr, list(zip(args, tags, strict=True)))]

    def _origin(self, tag: int) -> Origin | None:
        """Decodes a tag to its operation and the iteration of each enclosing loop."""
        if tag >= CONSTANT:
            sum_over_devices = Origin(Operation("a sum over devices"))
            return {int(CONSTANT): Origin(None), int(ELSEWHERE): sum_over_devices}.get(tag)
        index, iteration = divmod(tag, self._num_iterations)
        operation = self._operations[index]
        is_known = iteration < self._num_iterations - 1
        iterations: list[int | None] = []
        # The index is a mixed-radix number with one digit per loop; the innermost loop is last.
        for loop in reversed(operation.loops):
            length = loop.length or NUM_WHILE_ITERATIONS
            iteration, digit = divmod(iteration, length)
            in_loop: int | None = digit
            if loop.length is None and digit == length - 1:
                in_loop = None
            elif loop.is_reversed:
                in_loop = length - 1 - digit
            iterations.insert(0, in_loop if is_known else None)
        return Origin(operation, tuple(iterations))


def _pruned(jaxpr: Any, outputs: Sequence[int]) -> Any:
    """Returns a closed jaxpr with only the given outputs and the operations needed for them."""
    inner, eqns = open_jaxpr(jaxpr), []
    outvars = [inner.outvars[i] for i in outputs]
    needed = set(map(id, outvars))
    # Backwards, so that all uses of a value are seen before the operation that computes it.
    for eqn in reversed(inner.eqns):
        if not needed.isdisjoint(map(id, eqn.outvars)):
            eqns.append(eqn)
            needed.update(map(id, eqn.invars))
    return jaxpr.replace(jaxpr=inner.replace(eqns=eqns[::-1], outvars=outvars))
