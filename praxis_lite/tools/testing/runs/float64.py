"""A program run in float64: what rounding hides in float32 differs by 1e-9 or not at all."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from praxis_lite.tools.explain.hlo_layers import PACKAGE_FOLDER, layers_of_name, own_frames
from praxis_lite.tools.non_finite.jaxprs import (
    CALLS,
    inner_programs,
    joined,
    opened,
    scan_counts,
)
from praxis_lite.tools.testing.runs.wide_types import (
    SCATTERS,
    as_dtype,
    scattered,
    wide_dtype,
    wide_param,
    widened,
)

PyTree = Any
_MOST_TURNS = 128  # Of a scan whose turns are told apart: a stack's, and not a sequence's.
# What computes in the types it was written for: callbacks, kernels, draws by their bits.
_KEEPS_TYPES = {
    "bitcast_convert_type", "random_gamma", "pure_callback", "io_callback", "debug_callback",
    "pallas_call", "ffi_call", "custom_partitioning", "custom_linear_solve",
}


def in_float64(
    function: Callable[..., PyTree], *args: PyTree, without_randomness: bool = False,
    by_layer: bool = False,
) -> Callable[..., PyTree]:
    """Returns `function` with each float of up to 32 bits that it computes with in float64.

    It is traced once, as written, for arguments like `args`, and its operations are then done in
    float64, in its loops, branches and calls too; so it holds for models of others and for every
    optimizer. Random numbers are drawn from the same bits. To be compiled and called where 64-bit
    types are on (`jax.enable_x64(True)`). Its attribute `draws` says whether it draws any.

    Args:
      args: arrays or ShapeDtypeStructs in the types that `function` is written for.
      without_randomness: all random bits are 0, so that dropout keeps everything.
      by_layer: the function returns besides, by "NUMBER|LAYER" in the program's order, what
        `fingerprint` makes of the last array of each stretch of operations of one layer, in each
        turn of a scan ([turns, 2] of many), on each device in a shard_map. Where no layer is named
        it is the user's line of code. Other loops and branches are passed over.
    """
    with jax.enable_x64(False):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    treedef = jax.tree.structure(shapes)

    @functools.wraps(function)
    def wide(*args: PyTree) -> PyTree:
        run = _Run(without_randomness, by_layer)
        outputs = jax.tree.unflatten(treedef, run.call(closed, jax.tree.leaves(args)))
        if not by_layer:
            return outputs
        return outputs, {f"{i:06d}|{name}": x for i, (name, x) in enumerate(run.seen)}

    wide.draws = _draws(closed)
    return wide


def fingerprint(x: jax.Array) -> jax.Array:
    """Returns two sums [2] over an array, the second with weights that differ by element."""
    x = jnp.where(jnp.isfinite(x), x, 0.0).astype(np.float64)
    weights = jnp.ones((), np.float64)
    for dim in range(x.ndim):
        index = lax.broadcasted_iota(np.int32, x.shape, dim).astype(np.float64)
        weights = weights * jnp.cos(index * (1.0 + dim / 7) + 0.5)
    return jnp.stack([jnp.sum(x), jnp.sum(x * weights)])


class _Run:
    def __init__(self, without_randomness: bool, by_layer: bool):
        self._without_randomness, self._by_layer = without_randomness, by_layer
        self._name_stack = ""
        self.seen: list[tuple[str, jax.Array]] = []
        self._last: tuple[str, jax.Array] | None = None

    def call(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        inner = opened(jaxpr)
        known = {
            var: widened(x)
            for var, x in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True)
        }
        known |= dict(zip(inner.invars, args, strict=True))
        around = self._name_stack

        def read(atom: Any) -> Any:
            if not hasattr(atom, "val"):
                return known[atom]
            return np.asarray(atom.val, wide_dtype(atom.aval.dtype))

        for one in inner.eqns:
            self._name_stack = joined(around, str(one.source_info.name_stack))
            with one.ctx.manager, jax.enable_x64(True):
                results = self._equation(one, [read(atom) for atom in one.invars])
            known |= dict(zip(one.outvars, results, strict=True))
            if self._by_layer and one.primitive.name not in CALLS:
                self._look_at(one, results[-1] if results else None)
            self._name_stack = around
        return [read(atom) for atom in inner.outvars]

    def _look_at(self, one: Any, x: Any) -> None:
        if x is None or not jnp.issubdtype(x.dtype, np.floating):
            return
        layer = layers_of_name(f"{self._name_stack}/operation", _users_line(one))[0]
        if self._last is not None and self._last[0] != layer:
            self._end_stretch()
        self._last = layer, x

    def _end_stretch(self) -> None:
        if self._last is not None:
            layer, x = self._last
            self.seen.append((layer, fingerprint(x)))
        self._last = None

    def _equation(self, one: Any, args: list[Any]) -> list[Any]:
        name = one.primitive.name
        if name in CALLS:
            jaxpr = one.params["jaxpr"] if "jaxpr" in one.params else one.params["call_jaxpr"]
            return self.call(jaxpr, args)
        rule = {
            "scan": self._scan, "while": self._while, "cond": self._cond,
            "shard_map": self._shard_map,
        }.get(name)
        if rule is not None:
            return rule(one, args)
        if name == "reduce_precision":  # It rounds to what float32 holds.
            return args
        if one.primitive in SCATTERS:
            return [scattered(one, args)]
        if name in _KEEPS_TYPES:
            args = [as_dtype(x, atom.aval.dtype) for x, atom in zip(args, one.invars, strict=True)]
            return [widened(x) for x in _bound(one, args, one.params)]
        results = _bound(one, args, {key: wide_param(x) for key, x in one.params.items()})
        if name == "random_bits" and self._without_randomness:
            results = [lax.bitwise_and(x, lax.full_like(x, 0)) for x in results]
        # What an operation returns in float32 whatever it is given is widened.
        return [widened(x) for x in results]

    def _scan(self, one: Any, args: list[Any]) -> list[Any]:
        params = one.params
        num_consts, num_carry = scan_counts(params)
        num_fixed = num_consts + num_carry
        self._end_stretch()
        layers: list[str] = []

        def body(carry: tuple, xs: list[Any]) -> tuple:
            outs, layers[:], seen = self._apart(
                params["jaxpr"], [*args[:num_consts], *carry, *xs]
            )
            return tuple(outs[:num_carry]), (outs[num_carry:], seen)

        first = tuple(map(jnp.asarray, args[num_consts:num_fixed]))
        xs = list(map(jnp.asarray, args[num_fixed:]))
        last, (ys, seen) = lax.scan(
            body, first, xs, params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        turns = range(params["length"])
        if len(turns) > _MOST_TURNS:
            self.seen += zip(layers, seen, strict=True)
            return [*last, *ys]
        for turn in reversed(turns) if params["reverse"] else turns:
            self.seen += [(layer, x[turn]) for layer, x in zip(layers, seen, strict=True)]
        return [*last, *ys]

    def _apart(
        self, jaxpr: Any, args: Sequence[Any]
    ) -> tuple[list[Any], list[str], list[jax.Array]]:
        """Returns the outputs of a program, and the layers and fingerprints seen in it alone."""
        before, self.seen = self.seen, []
        outs = self.call(jaxpr, args)
        self._end_stretch()
        seen, self.seen = self.seen, before
        return outs, [name for name, _ in seen], [x for _, x in seen]

    def _while(self, one: Any, args: list[Any]) -> list[Any]:
        params = one.params
        num_cond = params["cond_nconsts"]
        num_fixed = num_cond + params["body_nconsts"]

        def cond(values: tuple) -> Any:
            return self._inside(params["cond_jaxpr"], [*args[:num_cond], *values])[0]

        def body(values: tuple) -> tuple:
            return tuple(self._inside(params["body_jaxpr"], [*args[num_cond:num_fixed], *values]))

        return list(lax.while_loop(cond, body, tuple(map(jnp.asarray, args[num_fixed:]))))

    def _cond(self, one: Any, args: list[Any]) -> list[Any]:
        branches = [
            lambda *operands, jaxpr=jaxpr: tuple(map(jnp.asarray, self._inside(jaxpr, operands)))
            for jaxpr in one.params["branches"]
        ]
        return list(lax.switch(args[0], branches, *map(jnp.asarray, args[1:])))

    def _shard_map(self, one: Any, args: list[Any]) -> list[Any]:
        params = one.params
        axes = tuple(sorted(params["newly_manual_axes"]))
        self._end_stretch()
        layers: list[str] = []

        def body(*values: Any) -> tuple:
            outs, layers[:], seen = self._apart(params["jaxpr"], values)
            return tuple(outs), [x[None] for x in seen]

        outs, seen = jax.shard_map(
            body, mesh=params["mesh"], in_specs=tuple(params["in_specs"]),
            out_specs=(tuple(params["out_specs"]), PartitionSpec(axes)), axis_names=set(axes),
            check_vma=params["check_vma"],
        )(*args)
        for layer, x in zip(layers, seen, strict=True):
            self.seen += [(layer, of_device) for of_device in x]
        return list(outs)

    def _inside(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        # Its values stay in a loop or a branch: they cannot be looked at from outside.
        before, self._by_layer = self._by_layer, False
        outs = self.call(jaxpr, args)
        self._by_layer = before
        return outs


def _users_line(one: Any) -> str:
    """Returns "my_model.py:12", the user's innermost line of an operation, or ""."""
    traceback = one.source_info.traceback
    frames = [] if traceback is None else [(x.file_name, x.line_num) for x in traceback.frames]
    users = [x for x in own_frames(frames) if not x[0].startswith(PACKAGE_FOLDER)]
    return f"{os.path.basename(users[0][0])}:{users[0][1]}" if users else ""


def _draws(jaxpr: Any) -> bool:
    return any(
        one.primitive.name == "random_bits" or any(map(_draws, inner_programs(one)))
        for one in opened(jaxpr).eqns
    )


def _bound(one: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    results = one.primitive.bind(*args, **one.primitive.get_bind_params(params))
    return list(results) if one.primitive.multiple_results else [results]
