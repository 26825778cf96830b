"""Evaluates a jaxpr with a tag per array, which identifies where the array became non-finite.

An operation is an origin if it produces a non-finite number from finite numbers. Tags are
propagated through loops, branches and calls.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from praxis_lite.core.collectives.varying import varying_over
from praxis_lite.core.jaxprs import is_widening_cast, split_loop_operands
from praxis_tools.interpreter import CALLS, Interpreter, bind, run_shard_map

Pair = tuple[Any, Any]  # (value, tag).
# A tag is an int32, operation * num_iterations + iteration. The smallest of several tags is the
# first origin. These values are reserved:
NOWHERE = np.int32(2**31 - 1)  # The array is finite.
ELSEWHERE = np.int32(2**31 - 2)  # The number was received from another device.
CONSTANT = np.int32(2**31 - 3)  # The number is a constant in the jaxpr.
NUM_WHILE_ITERATIONS = 1000  # Number of iterations distinguished in a loop of unknown length.

# Collectives under shard_map, whose results contain numbers from other devices.
_COLLECTIVES = {
    "psum",
    "psum2",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "ragged_all_to_all",
    "ppermute",
    "reduce_scatter",
    "unreduced_psum",
    "unreduced_reduce_scatter",
}
# Operations that only move, copy or negate numbers. They are never origins.
_SAME_NUMBERS = {
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "neg",
    "abs",
    "copy",
    "copy_p",
    "squeeze",
    "rev",
    "expand_dims",
    "name",
    "stop_gradient",
    "sharding_constraint",
    "pvary",
    "layout_constraint",
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around an operation.

    Attributes:
      name_stack: Name scopes of the loop.
      tracebacks: Where the loop was called.
      length: Number of iterations, or None if unknown.
      is_reversed: Whether a scan runs from the last element to the first.
    """

    name_stack: str
    tracebacks: tuple[Any, ...]
    length: int | None
    is_reversed: bool = False


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation or an argument of a jaxpr.

    Attributes:
      primitive: Name of the JAX primitive, such as "log".
      name_stack: Name scopes of the operation.
      tracebacks: Where the operation was called.
      loops: The loops around the operation, outermost first.
      argument: Index of the argument, or None for an operation.
    """

    primitive: str
    name_stack: str = ""
    tracebacks: tuple[Any, ...] = ()
    loops: tuple[Loop, ...] = ()
    argument: int | None = None


class TaggedRun(Interpreter):
    """An interpreter whose values are pairs of an array and its tag.

    Attributes:
      operations: The operations traced so far; a tag contains an index into this list.
    """

    def __init__(self, num_iterations: int, infinities_count: jax.Array, never: jax.Array):
        super().__init__()
        self.operations: list[Operation] = []
        self._num_iterations = num_iterations
        self._infinities_count, self._never = infinities_count, never
        self._loops: tuple[Loop, ...] = ()
        # Flattened index of the current iteration of all enclosing loops.
        self._iteration: Any = np.int32(0)
        # Each check of an array depends on the previous check. Otherwise, devices could run the
        # collectives in different orders and deadlock.
        self._last_check: Any = np.bool_(False)
        # Manual axes of the enclosing shard_maps with check_vma; tags vary over all of them.
        self._varying_axes: tuple[str, ...] = ()

    def argument_tag(self, index: int, x: Any) -> Any:
        """Returns the tag of an argument of the jaxpr."""
        if not _is_float(x):
            return NOWHERE
        self.operations.append(Operation("argument", argument=index))
        return self._tag(x, [], self._here())

    def constant(self, value: Any, aval: Any) -> Pair:
        return value, self._constant_tag(value)

    def results(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        repeats = eqn.params.get("differentiated") and eqn.params.get("prevent_cse", True)
        if repeats and eqn.primitive.name in CALLS:
            # Prevent XLA from saving values that rematerialization should recompute.
            args, tags = _unzipped(operands)
            is_array = [not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in args]
            arrays = iter(lax.optimization_barrier(list(itertools.compress(args, is_array))))
            args = [
                next(arrays) if replace else x for x, replace in zip(args, is_array, strict=True)
            ]
            operands = _zipped(args, tags)
        return super().results(eqn, operands)

    def operation(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        args, tags = _unzipped(operands)
        name, results = eqn.primitive.name, bind(eqn, args)
        if name in _SAME_NUMBERS or is_widening_cast(eqn):
            return [(results[0], tags[0])]
        if not any(map(_is_float, results)):
            return [(x, NOWHERE) for x in results]
        self.operations.append(Operation(name, self.name_stack, self.tracebacks, self._loops))
        # If the number was received from another device, the tags on that device identify the
        # origin.
        here = ELSEWHERE if name in _COLLECTIVES else self._here()
        return [(x, self._tag(x, tags, here)) for x in results]

    def _here(self) -> Any:
        """Returns the tag of the most recent operation in the current iteration."""
        first = (len(self.operations) - 1) * self._num_iterations
        last = np.int32(self._num_iterations - 1)
        return lax.add(np.int32(first), lax.min(self._iteration, last))

    def _tag(self, x: Any, tags: Sequence[Any], here: Any) -> Any:
        """Returns the tag of an operation's result.

        Args:
          x: The result.
          tags: Tags of the operands.
          here: Tag of the result if the operands are finite and the result is not.
        """
        if not _is_float(x):
            return NOWHERE
        origin = here
        if tags := [tag for tag in tags if tag is not NOWHERE]:
            first = functools.reduce(lax.min, tags)
            origin = lax.select(lax.eq(first, NOWHERE), here, first)
        return lax.select(self._is_bad(x), origin, NOWHERE)

    def _is_bad(self, x: Any) -> Any:
        """Returns whether `x` contains a NaN (or an infinity, if infinities are checked)."""
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = lax.abs(x)
        elif x.dtype.itemsize < 2:
            # XLA does not support this operation for some float8 types.
            x = lax.convert_element_type(x, np.float32)
        infinities = lax.bitwise_or(
            self._infinities_count, lax.bitwise_and(self._last_check, self._never)
        )
        infinities = lax.broadcast(infinities, np.shape(x))
        bad = lax.bitwise_or(
            lax.ne(x, x), lax.bitwise_and(lax.bitwise_not(lax.is_finite(x)), infinities)
        )
        self._last_check = lax.reduce(bad, np.bool_(False), lax.bitwise_or, tuple(range(bad.ndim)))
        return self._last_check

    def _constant_tag(self, x: Any) -> Any:
        if not _is_float(x) and not isinstance(x, float):
            return NOWHERE
        if isinstance(x, jax.Array):
            return lax.select(self._is_bad(x), CONSTANT, NOWHERE)
        x = np.asarray(x).astype(np.float32)
        if np.isnan(x).any():
            return CONSTANT
        if np.isfinite(x).all():
            return NOWHERE
        return lax.select(self._infinities_count, CONSTANT, NOWHERE)

    def scan(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        # The carry of the tagged scan is (values with tags, iteration, last check). The inputs `xs`
        # have one tag each, so an element only gets the tag if it is itself non-finite. The tags of
        # the outputs `ys` are merged over all iterations.
        params, length = eqn.params, eqn.params["length"]
        consts, carry, xs = split_loop_operands(eqn, operands)
        arrays, tags = _unzipped(xs)
        loop = Loop(self.name_stack, self.tracebacks, length, params["reverse"])

        def body(state: tuple, row: list[Any]) -> tuple[tuple, list[Pair]]:
            values, index, self._last_check = state
            with self._in_iteration(loop, index):
                tagged = [
                    (x, lax.select(self._is_bad(x), tag, NOWHERE) if _is_float(x) else NOWHERE)
                    for x, tag in zip(row, tags, strict=True)
                ]
                outs = self.call(params["jaxpr"], [*consts, *values, *tagged])
            state = self._carried(outs[: len(carry)], lax.add(index, np.int32(1)))
            return state, outs[len(carry) :]

        (last, _, self._last_check), ys = lax.scan(
            body, self._carried(carry, np.int32(0)), arrays, length, reverse=params["reverse"]
        )
        return [*last, *((y, _first(tags)) for y, tags in ys)]

    def while_loop(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        cond_consts, body_consts, carry = split_loop_operands(eqn, operands)
        loop = Loop(self.name_stack, self.tracebacks, None)

        def cond(state: tuple) -> Any:
            args, _ = _unzipped([*cond_consts, *state[0]])
            return jaxpr_as_fun(eqn.params["cond_jaxpr"])(*args)[0]

        def body(state: tuple) -> tuple:
            values, index, self._last_check = state
            last = np.int32(NUM_WHILE_ITERATIONS - 1)
            with self._in_iteration(loop, lax.min(index, last)):
                values = self.call(eqn.params["body_jaxpr"], [*body_consts, *values])
            return self._carried(values, lax.add(index, np.int32(1)))

        values, _, self._last_check = lax.while_loop(cond, body, self._carried(carry, np.int32(0)))
        return list(values)

    def cond(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        def branch(jaxpr: Any) -> Callable[..., tuple]:
            def run(operands: list[Pair], before: Any) -> tuple:
                self._last_check = before
                return self._carried(self.call(jaxpr, operands))

            return run

        branches = [branch(jaxpr) for jaxpr in eqn.params["branches"]]
        values = [(x, jnp.asarray(tag)) for x, tag in operands[1:]]
        outs, self._last_check = lax.switch(
            operands[0][0], branches, values, _arrays(self._last_check)
        )
        return list(outs)

    def _carried(self, pairs: Sequence[Pair], *extra: Any) -> tuple:
        """Converts values and tags to arrays for a loop's carry or a branch's result."""
        (values, tags), extra = _arrays(_unzipped(pairs)), _arrays((*extra, self._last_check))
        tags, *extra = varying_over((tags, *extra), self._varying_axes)
        return _zipped(values, tags), *extra

    @contextlib.contextmanager
    def _in_iteration(self, loop: Loop, index: Any) -> Iterator[None]:
        outer = self._loops, self._iteration
        length = loop.length or NUM_WHILE_ITERATIONS
        largest = np.int32((2**31 - 1) // max(length, 1) - 1)  # Avoids an overflow.
        self._loops = (*self._loops, loop)
        self._iteration = lax.add(
            lax.mul(lax.min(self._iteration, largest), np.int32(length)), index
        )
        yield
        self._loops, self._iteration = outer

    def shard_map(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        # Tags are per device, because a device must not wait for devices in a different branch.
        params, (args, tags) = eqn.params, _unzipped(operands)
        outer = self._last_check, self._iteration, self._infinities_count, self._never
        axes, outer_axes = tuple(params["newly_manual_axes"]), self._varying_axes

        def on_a_device(values: tuple, value_tags: list, state: tuple) -> tuple:
            self._last_check, self._iteration, self._infinities_count, self._never = state
            self._varying_axes = outer_axes + axes if params["check_vma"] else ()
            outs, out_tags = _unzipped(self.call(params["jaxpr"], _zipped(values, value_tags)))
            return tuple(outs), jax.tree.map(_with_leading_dim, (out_tags, self._last_check))

        replicated, per_device = PartitionSpec(), PartitionSpec(axes)
        outs, (out_tags, checks) = run_shard_map(
            eqn, on_a_device, [replicated, replicated], [per_device]
        )(tuple(args), _arrays(tags), _arrays(outer))
        self._varying_axes = outer_axes
        _, self._iteration, self._infinities_count, self._never = outer
        self._last_check = lax.reduce(checks, np.bool_(False), lax.bitwise_or, (0,))
        return _zipped(outs, map(_first, out_tags))


def _unzipped(pairs: Sequence[Pair]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in pairs], [tag for _, tag in pairs]


def _zipped(values: Iterable[Any], tags: Iterable[Any]) -> list[Pair]:
    return list(zip(values, tags, strict=True))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.inexact)


def _first(tags: Any) -> Any:
    """Returns the first origin among the tags [N] of an array's N parts."""
    return lax.reduce(tags, NOWHERE, lax.min, (0,))


def _arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def _with_leading_dim(x: Any) -> Any:
    return lax.reshape(jnp.asarray(x), (1,))
