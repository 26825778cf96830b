"""A program run operation by operation, with a record of what each of its layers computes."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from praxis_lite.core.jaxprs import split_loop_operands
from praxis_lite.core.user_lines import LIBRARY_FOLDERS
from praxis_tools.explain.hlo_layers import layers_of_name, own_frames
from praxis_tools.interpreter import CALLS, Interpreter, bound, mapped

_MOST_ITERATIONS = 128  # Of a scan that is recorded by iteration: one over layers, not over tokens.


class LayerRecorder(Interpreter):
    """A run of a program in its own types.

    It records the last array of each stretch of operations of one layer, in each iteration of a
    scan ([iterations, ...] of many), on each device in a shard_map. Where no layer is named it is
    the user's line of code. Other loops and branches are passed over.

    Args:
      summary: returns the few numbers that are recorded of an array; None: nothing is recorded.
    """

    def __init__(self, summary: Callable[[jax.Array], jax.Array] | None):
        super().__init__()
        self._summary, self._is_recording = summary, summary is not None
        self._seen: list[tuple[str, jax.Array]] = []
        self._last: tuple[str, jax.Array] | None = None

    @property
    def records(self) -> dict[str, jax.Array]:
        """What was recorded, by "NUMBER|LAYER" in the program's order."""
        return {f"{i:06d}|{name}": x for i, (name, x) in enumerate(self._seen)}

    def constant(self, value: Any, aval: Any) -> Any:
        return value if isinstance(value, jax.Array) else np.asarray(value, aval.dtype)

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        return bound(eqn, operands)

    def results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        results = super().results(eqn, operands)
        if self._is_recording and results and eqn.primitive.name not in CALLS:
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
            self._seen.append((layer, self._summary(x)))
        self._last = None

    def scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params, (consts, carry, xs) = eqn.params, split_loop_operands(eqn, operands)
        self._end_stretch()
        layers: list[str] = []

        def body(carry: tuple, xs: list[Any]) -> tuple:
            outs, layers[:], seen = self._apart(params["jaxpr"], [*consts, *carry, *xs])
            return tuple(outs[: len(carry)]), (outs[len(carry) :], seen)

        last, (ys, seen) = lax.scan(
            body, tuple(map(jnp.asarray, carry)), list(map(jnp.asarray, xs)), params["length"],
            reverse=params["reverse"], unroll=params["unroll"],
        )
        iterations = range(params["length"])
        if len(iterations) > _MOST_ITERATIONS:
            self._seen += zip(layers, seen, strict=True)
            return [*last, *ys]
        for i in reversed(iterations) if params["reverse"] else iterations:
            self._seen += [(layer, x[i]) for layer, x in zip(layers, seen, strict=True)]
        return [*last, *ys]

    def _apart(
        self, jaxpr: Any, args: Sequence[Any]
    ) -> tuple[list[Any], list[str], list[jax.Array]]:
        """Returns the outputs of a program, and the layers and summaries seen in it alone."""
        before, self._seen = self._seen, []
        outs = self.call(jaxpr, args)
        self._end_stretch()
        seen, self._seen = self._seen, before
        return outs, [name for name, _ in seen], [x for _, x in seen]

    def while_loop(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params, (of_cond, of_body, carry) = eqn.params, split_loop_operands(eqn, operands)

        def cond(values: tuple) -> Any:
            return self._unrecorded(params["cond_jaxpr"], [*of_cond, *values])[0]

        def body(values: tuple) -> tuple:
            return tuple(self._unrecorded(params["body_jaxpr"], [*of_body, *values]))

        return list(lax.while_loop(cond, body, tuple(map(jnp.asarray, carry))))

    def cond(self, eqn: Any, operands: list[Any]) -> list[Any]:
        branches = [
            lambda *operands, jaxpr=jaxpr: tuple(
                map(jnp.asarray, self._unrecorded(jaxpr, operands))
            )
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
            self._seen += [(layer, of_device) for of_device in x]
        return list(outs)

    def _unrecorded(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        # Its values stay in a loop or a branch: they cannot be looked at from outside.
        before, self._is_recording = self._is_recording, False
        outs = self.call(jaxpr, args)
        self._is_recording = before
        return outs


def _users_line(eqn: Any) -> str:
    """Returns "my_model.py:12", the user's innermost line of an operation, or ""."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else [(x.file_name, x.line_num) for x in traceback.frames]
    users = [x for x in own_frames(frames) if not x[0].startswith(LIBRARY_FOLDERS)]
    return f"{os.path.basename(users[0][0])}:{users[0][1]}" if users else ""
