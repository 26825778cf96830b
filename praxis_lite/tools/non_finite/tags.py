"""A program run with a tag beside each array, which tells where it stopped being finite.

An operation is an origin if it makes a number that is not finite out of finite ones. Tags go where
the numbers go, through loops, branches and calls, and end where the numbers end.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.varying import varying_over
from praxis_lite.tools.non_finite.jaxprs import (
    CALLS,
    COLLECTIVES,
    SAME_NUMBERS,
    Loop,
    Operation,
    joined,
    needed,
    only_widens,
    opened,
    scan_counts,
)

# A tag is an int32: operation * turns + turn, so that the smallest of several is the first in the
# program.
NOWHERE = np.int32(2**31 - 1)  # All of the array is finite.
ELSEWHERE = np.int32(2**31 - 2)  # Another device made it, and sent it.
CONSTANT = np.int32(2**31 - 3)
NUM_WHILE_TURNS = 1000  # Of a loop of unknown length, the turns that are told apart.


class TaggedRun:
    """A trace of a program with tags: the operations seen so far, and the trace's place."""

    def __init__(self, num_turns: int, infinities_count: jax.Array, never: jax.Array):
        self.operations: list[Operation] = []
        self._num_turns, self._infinities_count, self._never = num_turns, infinities_count, never
        self._name_stack, self._tracebacks, self._loops = "", (), ()
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

    def call(
        self, jaxpr: Any, args: Sequence[Any], tags: Sequence[Any],
        outputs: Sequence[int] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Returns the outputs of a jaxpr and their tags; only those in `outputs`, if given."""
        inner = opened(jaxpr)
        outvars = inner.outvars if outputs is None else [inner.outvars[i] for i in outputs]
        equations = inner.eqns if outputs is None else needed(inner.eqns, outvars)
        known = {
            var: (x, self._constant_tag(x))
            for var, x in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True)
        }
        known |= dict(zip(inner.invars, zip(args, tags, strict=True), strict=True))

        def read(atom: Any) -> tuple[Any, Any]:
            return (atom.val, self._constant_tag(atom.val)) if hasattr(atom, "val") else known[atom]

        around = self._name_stack, self._tracebacks
        for one in equations:
            self._name_stack = joined(around[0], str(one.source_info.name_stack))
            self._tracebacks = (one.source_info.traceback, *around[1])
            operands = [read(atom) for atom in one.invars]
            with one.ctx.manager:
                results = self._equation(one, [x for x, _ in operands], [t for _, t in operands])
            known |= dict(zip(one.outvars, zip(*results, strict=True), strict=True))
            self._name_stack, self._tracebacks = around
        read_out = [read(atom) for atom in outvars]
        return [x for x, _ in read_out], [tag for _, tag in read_out]

    def _equation(self, one: Any, args: list[Any], tags: list[Any]) -> tuple[list, list[Any]]:
        name = one.primitive.name
        if name in CALLS:
            jaxpr = one.params["jaxpr"] if "jaxpr" in one.params else one.params["call_jaxpr"]
            if one.params.get("differentiated") and one.params.get("prevent_cse", True):
                # Values that are computed again to save memory must not be kept instead.
                arrays = [i for i, x in enumerate(args) if not jnp.issubdtype(
                    x.dtype, jax.dtypes.extended)]
                held = lax.optimization_barrier([args[i] for i in arrays])
                for i, x in zip(arrays, held, strict=True):
                    args[i] = x
            return self.call(jaxpr, args, tags)
        rule = {"scan": self._scan, "while": self._while, "cond": self._cond,
                "shard_map": self._shard_map}.get(name)
        if rule is not None:
            return rule(one, args, tags)
        results = one.primitive.bind(*args, **one.primitive.get_bind_params(one.params))
        results = list(results) if one.primitive.multiple_results else [results]
        if name in SAME_NUMBERS or only_widens(one):
            return results, tags[:1]
        if not any(map(_is_float, results)):
            return results, [NOWHERE] * len(results)
        self.operations.append(Operation(name, self._name_stack, self._tracebacks, self._loops))
        # A number that another device sent was made there, and that device knows where.
        here = ELSEWHERE if name in COLLECTIVES else self._here()
        return results, [self._tag(x, tags, here) for x in results]

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

    def _scan(self, one: Any, args: list[Any], tags: list[Any]) -> tuple[list, list[Any]]:
        params, length = one.params, one.params["length"]
        num_consts, num_carry = scan_counts(params)
        num_fixed = num_consts + num_carry
        loop = Loop(self._name_stack, self._tracebacks, length, params["reverse"])

        def body(state: tuple, xs: list[Any]) -> tuple:
            values, value_tags, index, self._before = state
            with self._in_turn(loop, index):
                row_tags = [
                    lax.select(self._is_bad(x), tag, NOWHERE) if _is_float(x) else NOWHERE
                    for x, tag in zip(xs, tags[num_fixed:], strict=True)
                ]
                outs, out_tags = self.call(
                    params["jaxpr"], [*args[:num_consts], *values, *xs],
                    [*tags[:num_consts], *value_tags, *row_tags],
                )
            carry = outs[:num_carry], out_tags[:num_carry], lax.add(index, np.int32(1))
            return self._carried(*carry), (outs[num_carry:], out_tags[num_carry:])

        first = self._carried(args[num_consts:num_fixed], tags[num_consts:num_fixed], np.int32(0))
        (last, last_tags, _, self._before), (ys, ys_tags) = lax.scan(
            body, first, list(args[num_fixed:]), length, reverse=params["reverse"]
        )
        return [*last, *ys], [*last_tags, *map(_first, ys_tags)]

    def _while(self, one: Any, args: list[Any], tags: list[Any]) -> tuple[list, list[Any]]:
        params = one.params
        num_cond = params["cond_nconsts"]
        num_fixed = num_cond + params["body_nconsts"]
        loop = Loop(self._name_stack, self._tracebacks, None)

        def cond(state: tuple) -> Any:
            jaxpr = params["cond_jaxpr"]
            consts = getattr(jaxpr, "consts", ())
            return jax.core.eval_jaxpr(opened(jaxpr), consts, *args[:num_cond], *state[0])[0]

        def body(state: tuple) -> tuple:
            values, value_tags, index, self._before = state
            with self._in_turn(loop, lax.min(index, np.int32(NUM_WHILE_TURNS - 1))):
                values, value_tags = self.call(
                    params["body_jaxpr"], [*args[num_cond:num_fixed], *values],
                    [*tags[num_cond:num_fixed], *value_tags],
                )
            return self._carried(values, value_tags, lax.add(index, np.int32(1)))

        first = self._carried(args[num_fixed:], tags[num_fixed:], np.int32(0))
        values, value_tags, _, self._before = lax.while_loop(cond, body, first)
        return values, value_tags

    def _cond(self, one: Any, args: list[Any], tags: list[Any]) -> tuple[list, list[Any]]:
        def branch(jaxpr: Any) -> Callable[..., tuple]:
            def run(operands: list, operand_tags: list, before: Any) -> tuple:
                self._before = before
                return self._carried(*self.call(jaxpr, operands, operand_tags))

            return run

        branches = [branch(jaxpr) for jaxpr in one.params["branches"]]
        outs, out_tags, self._before = lax.switch(
            args[0], branches, args[1:], _arrays(tags[1:]), _arrays(self._before)
        )
        return outs, out_tags

    def _carried(self, values: Sequence[Any], *known: Any) -> tuple:
        """Returns values and their tags in the types that a loop carries and a branch returns."""
        values, *known = _arrays((list(values), *known, self._before))
        return values, *varying_over(known, self._varying_axes)

    @contextlib.contextmanager
    def _in_turn(self, loop: Loop, index: Any) -> Iterator[None]:
        before = self._loops, self._turn
        length = loop.length or NUM_WHILE_TURNS
        most = np.int32((2**31 - 1) // max(length, 1) - 1)
        self._loops = (*self._loops, loop)
        self._turn = lax.add(lax.mul(lax.min(self._turn, most), np.int32(length)), index)
        yield
        self._loops, self._turn = before

    def _shard_map(self, one: Any, args: list[Any], tags: list[Any]) -> tuple[list, list[Any]]:
        # Each device has its own tags: it must not wait for one that took another branch.
        params = one.params
        around = self._before, self._turn, self._infinities_count, self._never
        axes, outer_axes = tuple(params["newly_manual_axes"]), self._varying_axes

        def on_a_device(values: tuple, value_tags: list, state: tuple) -> tuple:
            self._before, self._turn, self._infinities_count, self._never = state
            self._varying_axes = outer_axes + axes if params["check_vma"] else ()
            outs, out_tags = self.call(params["jaxpr"], values, value_tags)
            return tuple(outs), jax.tree.map(_row, (out_tags, self._before))

        whole, per_device = PartitionSpec(), PartitionSpec(axes)
        outs, (out_tags, seen) = jax.shard_map(
            on_a_device, mesh=params["mesh"],
            in_specs=(tuple(params["in_specs"]), whole, whole),
            out_specs=(tuple(params["out_specs"]), per_device),
            axis_names=set(axes), check_vma=params["check_vma"],
        )(tuple(args), _arrays(tags), _arrays(around))
        self._varying_axes = outer_axes
        _, self._turn, self._infinities_count, self._never = around
        self._before = lax.reduce(seen, np.bool_(False), lax.bitwise_or, (0,))
        return list(outs), list(map(_first, out_tags))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.inexact)


def _first(tags: Any) -> Any:
    """Returns the tag of an array, given the tags [n] of its parts."""
    return lax.reduce(tags, NOWHERE, lax.min, (0,))


def _arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def _row(x: Any) -> Any:
    return lax.reshape(jnp.asarray(x), (1,))
