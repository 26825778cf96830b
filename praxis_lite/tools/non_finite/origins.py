"""Which operation made the first NaN or infinity: a program run operation by operation.

Numbers that a select throws away, such as those of an attention's mask or a guarded division, are
never blamed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.core.jaxprs import with_inner
from praxis_lite.tools.non_finite.operations import Operation, cut
from praxis_lite.tools.non_finite.tags import CONSTANT, ELSEWHERE, NUM_WHILE_TURNS, TaggedRun


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a number stopped being finite.

    Attributes:
      operation: the one that made it, or None if it stands in the program as a constant.
      turns: for each of the operation's loops an index into what it runs over, or None if that
        is not known.
    """

    operation: Operation | None
    turns: tuple[int | None, ...] = ()


class OriginSearch:
    """Runs a program and finds where some of its outputs stopped being finite.

    Args:
      jaxpr: of the program, closed: `jax.jit(function).trace(...).jaxpr`.
      outputs: indices of the outputs to look at; operations that they do not need are not run.
      replicated: the sharding of results that every process reads; None if there is one process.
    """

    def __init__(
        self, jaxpr: Any, outputs: Sequence[int],
        replicated: jax.sharding.NamedSharding | None = None,
    ):
        self._jaxpr = cut(jaxpr, outputs)
        self._run = jax.jit(self._traced, out_shardings=replicated)

    def __call__(self, args: Sequence[jax.Array], *, only_nan: bool) -> list[Origin | None]:
        """Returns where each output stopped being finite, or None if it is finite.

        The program's arguments are flat, and are not donated. With `only_nan` infinities count as
        finite, so the answer is where the first NaN was made.
        """
        tags = jax.device_get(self._run(np.bool_(not only_nan), np.bool_(False), *args))
        return [self._origin(int(tag)) for tag in tags]

    def _traced(self, infinities_count: jax.Array, never: jax.Array, *args: jax.Array) -> list:
        # Twice as many as there are operations: JAX may trace a loop's body again.
        num_operations = 2 * (len(args) + sum(1 for _ in with_inner(self._jaxpr.eqns))) + 1
        self._num_turns = int(CONSTANT) // num_operations
        run = TaggedRun(self._num_turns, infinities_count, never)
        self._operations = run.operations
        tags = [run.argument_tag(index, x) for index, x in enumerate(args)]
        return [tag for _, tag in run.call(self._jaxpr, list(zip(args, tags, strict=True)))]

    def _origin(self, tag: int) -> Origin | None:
        if tag >= CONSTANT:
            sum_over_devices = Origin(Operation("a sum over devices"))
            return {CONSTANT: Origin(None), ELSEWHERE: sum_over_devices}.get(tag)
        index, turn = divmod(tag, self._num_turns)
        operation = self._operations[index]
        is_known, turns = turn < self._num_turns - 1, []
        for loop in reversed(operation.loops):
            length = loop.length or NUM_WHILE_TURNS
            turn, item = divmod(turn, length)
            if loop.length is None and item == length - 1:
                item = None
            elif loop.is_reversed:
                item = length - 1 - item
            turns.insert(0, item if is_known else None)
        return Origin(operation, tuple(turns))
