"""A program run with a tag beside each array, which tells where it stopped being finite.

An operation is an origin if it makes a number that is not finite out of finite ones. Tags go where
the numbers go, through loops, branches and calls, and end where the numbers end.
"""

import contextlib
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

from praxis_lite.collectives.varying import varying_over
from praxis_lite.core.jaxprs import of_loop, widens
from praxis_lite.tools.interpreter import CALLS, Interpreter, bound, mapped
from praxis_lite.tools.non_finite.operations import COLLECTIVES, SAME_NUMBERS, Loop, Operation

Pair = tuple[Any, Any]  # A value, and its tag.
# A tag is an int32: operation * turns + turn, so that the smallest of several is the first in the
# program.
NOWHERE = np.int32(2**31 - 1)  # All of the array is finite.
ELSEWHERE = np.int32(2**31 - 2)  # Another device made it, and sent it.
CONSTANT = np.int32(2**31 - 3)
NUM_WHILE_TURNS = 1000  # Of a loop of unknown length, the turns that are told apart.


class TaggedRun(Interpreter):
    """A trace of a program with tags: the operations seen so far, and the trace's place."""

    def __init__(self, num_turns: int, infinities_count: jax.Array, never: jax.Array):
        super().__init__()
        self.operations: list[Operation] = []
        self._num_turns, self._infinities_count, self._never = num_turns, infinities_count, never
        self._loops: tuple[Loop, ...] = ()
        self._turn: Any = np.int32(0)  # Of all loops around, as one number.
        # Each look at an array waits for the one before: collectives without an order between
        # them may meet in different orders on different devices, and hang.
        self._before: Any = np.bool_(False)
        # Manual axes of the shard_maps around that check what varies: tags vary over all of them.
        self._varying_axes: tuple[str, ...] = ()

    def argument_tag(self, index: int, x: Any) -> Any:
        if not _is_float(x):
            return NOWHERE
        self.operations.append(Operation("argument", argument=index))
        return self._tag(x, [], self._here())

    def constant(self, value: Any, aval: Any) -> Pair:
        return value, self._constant_tag(value)

    def results(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        repeats = eqn.params.get("differentiated") and eqn.params.get("prevent_cse", True)
        if repeats and eqn.primitive.name in CALLS:
            # Values that are computed again to save memory must not be kept instead.
            args, tags = _apart(operands)
            is_array = [not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in args]
            held = iter(lax.optimization_barrier(list(itertools.compress(args, is_array))))
            args = [next(held) if item else x for x, item in zip(args, is_array, strict=True)]
            operands = _pairs(args, tags)
        return super().results(eqn, operands)

    def operation(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        args, tags = _apart(operands)
        name, results = eqn.primitive.name, bound(eqn, args)
        if name in SAME_NUMBERS or widens(eqn):
            return [(results[0], tags[0])]
        if not any(map(_is_float, results)):
            return [(x, NOWHERE) for x in results]
        self.operations.append(Operation(name, self.name_stack, self.tracebacks, self._loops))
        # A number that another device sent was made there, and that device knows where.
        here = ELSEWHERE if name in COLLECTIVES else self._here()
        return [(x, self._tag(x, tags, here)) for x in results]

    def _here(self) -> Any:
        first = (len(self.operations) - 1) * self._num_turns
        return lax.add(np.int32(first), lax.min(self._turn, np.int32(self._num_turns - 1)))

    def _tag(self, x: Any, tags: Sequence[Any], here: Any) -> Any:
        """Returns the tag of `x`, which the operation `here` made of operands with these tags."""
        if not _is_float(x):
            return NOWHERE
        origin = here
        if tags := [tag for tag in tags if tag is not NOWHERE]:
            first = functools.reduce(lax.min, tags)
            origin = lax.select(lax.eq(first, NOWHERE), here, first)
        return lax.select(self._is_bad(x), origin, NOWHERE)

    def _is_bad(self, x: Any) -> Any:
        """Returns True if a number of `x` is NaN, or is infinite and infinities count."""
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = lax.abs(x)
        elif x.dtype.itemsize < 2:
            x = lax.convert_element_type(x, np.float32)  # Of float8 XLA does not know them all.
        infinities = lax.bitwise_or(
            self._infinities_count, lax.bitwise_and(self._before, self._never)
        )
        infinities = lax.broadcast(infinities, np.shape(x))
        bad = lax.bitwise_or(
            lax.ne(x, x), lax.bitwise_and(lax.bitwise_not(lax.is_finite(x)), infinities)
        )
        self._before = lax.reduce(bad, np.bool_(False), lax.bitwise_or, tuple(range(bad.ndim)))
        return self._before

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
        params, length = eqn.params, eqn.params["length"]
        consts, carry, xs = of_loop(eqn, operands)
        arrays, tags = _apart(xs)
        loop = Loop(self.name_stack, self.tracebacks, length, params["reverse"])

        def body(state: tuple, row: list[Any]) -> tuple:
            values, index, self._before = state
            with self._in_turn(loop, index):
                tagged = [
                    (x, lax.select(self._is_bad(x), tag, NOWHERE) if _is_float(x) else NOWHERE)
                    for x, tag in zip(row, tags, strict=True)
                ]
                outs = self.call(params["jaxpr"], [*consts, *values, *tagged])
            state = self._carried(outs[: len(carry)], lax.add(index, np.int32(1)))
            return state, outs[len(carry) :]

        (last, _, self._before), ys = lax.scan(
            body, self._carried(carry, np.int32(0)), arrays, length, reverse=params["reverse"]
        )
        return [*last, *((y, _first(tags)) for y, tags in ys)]

    def while_loop(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        of_cond, of_body, carry = of_loop(eqn, operands)
        loop = Loop(self.name_stack, self.tracebacks, None)

        def cond(state: tuple) -> Any:
            args, _ = _apart([*of_cond, *state[0]])
            return jaxpr_as_fun(eqn.params["cond_jaxpr"])(*args)[0]

        def body(state: tuple) -> tuple:
            values, index, self._before = state
            with self._in_turn(loop, lax.min(index, np.int32(NUM_WHILE_TURNS - 1))):
                values = self.call(eqn.params["body_jaxpr"], [*of_body, *values])
            return self._carried(values, lax.add(index, np.int32(1)))

        values, _, self._before = lax.while_loop(cond, body, self._carried(carry, np.int32(0)))
        return list(values)

    def cond(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        def branch(jaxpr: Any) -> Callable[..., tuple]:
            def run(operands: list[Pair], before: Any) -> tuple:
                self._before = before
                return self._carried(self.call(jaxpr, operands))

            return run

        branches = [branch(jaxpr) for jaxpr in eqn.params["branches"]]
        values = [(x, jnp.asarray(tag)) for x, tag in operands[1:]]
        outs, self._before = lax.switch(operands[0][0], branches, values, _arrays(self._before))
        return list(outs)

    def _carried(self, pairs: Sequence[Pair], *known: Any) -> tuple:
        """Returns values and their tags in the types that a loop carries and a branch returns."""
        (values, tags), known = _arrays(_apart(pairs)), _arrays((*known, self._before))
        tags, *known = varying_over((tags, *known), self._varying_axes)
        return _pairs(values, tags), *known

    @contextlib.contextmanager
    def _in_turn(self, loop: Loop, index: Any) -> Iterator[None]:
        before = self._loops, self._turn
        length = loop.length or NUM_WHILE_TURNS
        most = np.int32((2**31 - 1) // max(length, 1) - 1)
        self._loops = (*self._loops, loop)
        self._turn = lax.add(lax.mul(lax.min(self._turn, most), np.int32(length)), index)
        yield
        self._loops, self._turn = before

    def shard_map(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        # Each device has its own tags: it must not wait for one that took another branch.
        params, (args, tags) = eqn.params, _apart(operands)
        around = self._before, self._turn, self._infinities_count, self._never
        axes, outer_axes = tuple(params["newly_manual_axes"]), self._varying_axes

        def on_a_device(values: tuple, value_tags: list, state: tuple) -> tuple:
            self._before, self._turn, self._infinities_count, self._never = state
            self._varying_axes = outer_axes + axes if params["check_vma"] else ()
            outs, out_tags = _apart(self.call(params["jaxpr"], _pairs(values, value_tags)))
            return tuple(outs), jax.tree.map(_row, (out_tags, self._before))

        whole, per_device = PartitionSpec(), PartitionSpec(axes)
        outs, (out_tags, seen) = mapped(eqn, on_a_device, [whole, whole], [per_device])(
            tuple(args), _arrays(tags), _arrays(around)
        )
        self._varying_axes = outer_axes
        _, self._turn, self._infinities_count, self._never = around
        self._before = lax.reduce(seen, np.bool_(False), lax.bitwise_or, (0,))
        return _pairs(outs, map(_first, out_tags))


def _apart(pairs: Sequence[Pair]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in pairs], [tag for _, tag in pairs]


def _pairs(values: Iterable[Any], tags: Iterable[Any]) -> list[Pair]:
    return list(zip(values, tags, strict=True))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.inexact)


def _first(tags: Any) -> Any:
    """Returns the tag of an array, given the tags [n] of its parts."""
    return lax.reduce(tags, NOWHERE, lax.min, (0,))


def _arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def _row(x: Any) -> Any:
    return lax.reshape(jnp.asarray(x), (1,))
