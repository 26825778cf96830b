"""A program run in float64: what rounding hides in float32 differs by 1e-9 or not at all."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.sharding import PartitionSpec

from praxis_lite.core.jaxprs import of_loop, with_inner
from praxis_lite.tools.explain.hlo_layers import PACKAGE_FOLDER, layers_of_name, own_frames
from praxis_lite.tools.interpreter import CALLS, Interpreter, bound, mapped

PyTree = Any
_MOST_ITERATIONS = 128  # Of a scan that is recorded by iteration: one over layers, not over tokens.
# What computes in the types it was written for: callbacks, kernels, draws by their bits.
_KEEPS_TYPES = {
    "bitcast_convert_type", "random_gamma", "pure_callback", "io_callback", "debug_callback",
    "pallas_call", "ffi_call", "custom_partitioning", "custom_linear_solve",
}
_WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in (
        (jnp.float16, np.float64), (jnp.bfloat16, np.float64), (np.float32, np.float64),
        (np.complex64, np.complex128),
    )
}
_SCATTERS = {
    primitives.scatter_p: lax.scatter,
    primitives.scatter_add_p: lax.scatter_add,
    primitives.scatter_mul_p: lax.scatter_mul,
    primitives.scatter_min_p: lax.scatter_min,
    primitives.scatter_max_p: lax.scatter_max,
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
        run = Run(without_randomness, by_layer)
        outputs = jax.tree.unflatten(treedef, run.call(closed, jax.tree.leaves(args)))
        if not by_layer:
            return outputs
        return outputs, {f"{i:06d}|{name}": x for i, (name, x) in enumerate(run.seen)}

    wide.draws = any(eqn.primitive.name == "random_bits" for eqn in with_inner(closed.eqns))
    return wide


def fingerprint(x: jax.Array) -> jax.Array:
    """Returns two sums [2] over an array, the second with weights that differ by element."""
    x = jnp.where(jnp.isfinite(x), x, 0.0).astype(np.float64)
    weights = jnp.ones((), np.float64)
    for dim in range(x.ndim):
        index = lax.broadcasted_iota(np.int32, x.shape, dim).astype(np.float64)
        weights = weights * jnp.cos(index * (1.0 + dim / 7) + 0.5)
    return jnp.stack([jnp.sum(x), jnp.sum(x * weights)])


class Run(Interpreter):
    """A run in float64, which looks at what layers compute if asked."""

    def __init__(self, without_randomness: bool, by_layer: bool):
        super().__init__()
        self._without_randomness, self._by_layer = without_randomness, by_layer
        self.seen: list[tuple[str, jax.Array]] = []
        self._last: tuple[str, jax.Array] | None = None

    def fingerprint(self, x: jax.Array) -> jax.Array:
        """Returns the few numbers by which arrays of a layer are compared."""
        return fingerprint(x)

    def constant(self, value: Any, aval: Any) -> Any:
        if isinstance(value, jax.Array):
            return widened(value)
        return np.asarray(value, wide_dtype(aval.dtype))

    def results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        with jax.enable_x64(True):
            results = super().results(eqn, operands)
        if self._by_layer and results and eqn.primitive.name not in CALLS:
            self._look_at(eqn, results[-1])
        return results

    def _look_at(self, eqn: Any, x: Any) -> None:
        if not jnp.issubdtype(x.dtype, np.floating):
            return
        layer = layers_of_name(f"{self.name_stack}/operation", _users_line(eqn))[0]
        if self._last is not None and self._last[0] != layer:
            self._end_stretch()
        self._last = layer, x

    def _end_stretch(self) -> None:
        if self._last is not None:
            layer, x = self._last
            self.seen.append((layer, self.fingerprint(x)))
        self._last = None

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "reduce_precision":  # It rounds to what float32 holds.
            return operands
        if eqn.primitive in _SCATTERS:
            return [_scattered(eqn, operands)]
        if name in _KEEPS_TYPES:
            narrow = [
                _as_dtype(x, atom.aval.dtype) for x, atom in zip(operands, eqn.invars, strict=True)
            ]
            return [widened(x) for x in bound(eqn, narrow)]
        params = {key: _wide_param(x) for key, x in eqn.params.items()}
        results = bound(eqn, operands, params)
        if name == "random_bits" and self._without_randomness:
            results = [lax.bitwise_and(x, lax.full_like(x, 0)) for x in results]
        # What an operation returns in float32 whatever it is given is widened.
        return [widened(x) for x in results]

    def scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params, (consts, carry, xs) = eqn.params, of_loop(eqn, operands)
        self._end_stretch()
        layers: list[str] = []

        def body(carry: tuple, xs: list[Any]) -> tuple:
            outs, layers[:], seen = self._apart(params["jaxpr"], [*consts, *carry, *xs])
            return tuple(outs[: len(carry)]), (outs[len(carry) :], seen)

        last, (ys, seen) = lax.scan(
            body, tuple(map(jnp.asarray, carry)), list(map(jnp.asarray, xs)), params["length"],
            reverse=params["reverse"], unroll=params["unroll"],
        )
        turns = range(params["length"])
        if len(turns) > _MOST_ITERATIONS:
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

    def while_loop(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params, (of_cond, of_body, carry) = eqn.params, of_loop(eqn, operands)

        def cond(values: tuple) -> Any:
            return self._inside(params["cond_jaxpr"], [*of_cond, *values])[0]

        def body(values: tuple) -> tuple:
            return tuple(self._inside(params["body_jaxpr"], [*of_body, *values]))

        return list(lax.while_loop(cond, body, tuple(map(jnp.asarray, carry))))

    def cond(self, eqn: Any, operands: list[Any]) -> list[Any]:
        branches = [
            lambda *operands, jaxpr=jaxpr: tuple(map(jnp.asarray, self._inside(jaxpr, operands)))
            for jaxpr in eqn.params["branches"]
        ]
        return list(lax.switch(operands[0], branches, *map(jnp.asarray, operands[1:])))

    def shard_map(self, eqn: Any, operands: list[Any]) -> list[Any]:
        axes = tuple(sorted(eqn.params["newly_manual_axes"]))
        self._end_stretch()
        layers: list[str] = []

        def body(values: tuple) -> tuple:
            outs, layers[:], seen = self._apart(eqn.params["jaxpr"], values)
            return tuple(outs), [x[None] for x in seen]

        outs, seen = mapped(eqn, body, more_out=[PartitionSpec(axes)])(tuple(operands))
        for layer, x in zip(layers, seen, strict=True):
            self.seen += [(layer, of_device) for of_device in x]
        return list(outs)

    def _inside(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        # Its values stay in a loop or a branch: they cannot be looked at from outside.
        before, self._by_layer = self._by_layer, False
        outs = self.call(jaxpr, args)
        self._by_layer = before
        return outs


def _users_line(eqn: Any) -> str:
    """Returns "my_model.py:12", the user's innermost line of an operation, or ""."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else [(x.file_name, x.line_num) for x in traceback.frames]
    users = [x for x in own_frames(frames) if not x[0].startswith(PACKAGE_FOLDER)]
    return f"{os.path.basename(users[0][0])}:{users[0][1]}" if users else ""


def wide_dtype(dtype: Any) -> Any:
    """Returns float64 for a float of up to 32 bits, complex128 for complex64, else `dtype`."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if is_key else _WIDE.get(np.dtype(dtype), np.dtype(dtype))


def wide_structs(tree: PyTree) -> PyTree:
    """Returns a tree of ShapeDtypeStructs with floats in float64; shardings stay."""

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype), sharding=sharding)

    return jax.tree.map(one, tree)


def _wide_param(value: Any) -> Any:
    """Returns an operation's parameter for float64: a dtype widened, no algorithm of few bits."""
    if isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(
        value, np.generic))
    return wide_dtype(value) if is_dtype else value


def widened(x: Any) -> Any:
    """Returns an array in its wide dtype; other values as they are."""
    return _as_dtype(x, wide_dtype(x.dtype)) if hasattr(x, "dtype") else x


def _as_dtype(x: Any, dtype: Any) -> Any:
    """Returns an array in a dtype; a key as it is."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return x if is_key or x.dtype == dtype else lax.convert_element_type(x, dtype)


def _scattered(eqn: Any, args: list[Any]) -> Any:
    """Returns the result of a scatter of wide arrays; its parameters hold a narrow program."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return _SCATTERS[eqn.primitive](*args, **{name: eqn.params[name] for name in names})
