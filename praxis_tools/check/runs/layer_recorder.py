"""Runs a jaxpr operation by operation and records the values that each layer computes."""

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
from praxis_tools.interpreter import CALLS, Interpreter, bind, run_shard_map

# Scans with more iterations are over tokens instead of layers, and are not recorded per iteration.
_MAX_ITERATIONS = 128


class LayerRecorder(Interpreter):
    """An interpreter that runs a jaxpr with its original dtypes and records layer values.

    For each run of consecutive operations in the same layer, the last array is recorded. In a scan,
    this array is recorded once per iteration (or as one array [iterations, ...] if there are many
    iterations), and in a shard_map, once per device. Operations outside of named layers are
    recorded under the user's source line. While loops and branches are not recorded.

    Args:
      summary: Function that reduces an array to a few numbers to record, or None to record nothing.
    """

    def __init__(self, summary: Callable[[jax.Array], jax.Array] | None):
        super().__init__()
        self._summary, self._is_recording = summary, summary is not None
        self._recorded: list[tuple[str, jax.Array]] = []  # (layer, summary)
        self._last: tuple[str, jax.Array] | None = None  # Layer and array of the last operation.

    @property
    def records(self) -> dict[str, jax.Array]:
        """The recorded summaries, with keys "NUMBER|LAYER", in program order."""
        return {f"{i:06d}|{name}": x for i, (name, x) in enumerate(self._recorded)}

    def constant(self, value: Any, aval: Any) -> Any:
        return value if isinstance(value, jax.Array) else np.asarray(value, aval.dtype)

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        return bind(eqn, operands)

    def results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        results = super().results(eqn, operands)
        if self._is_recording and results and eqn.primitive.name not in CALLS:
            self._observe(eqn, results[-1])
        return results

    def _observe(self, eqn: Any, x: Any) -> None:
        if not jnp.issubdtype(x.dtype, np.floating):
            return
        layer = layers_of_name(f"{self.name_stack}/operation", _user_line(eqn))[0]
        if self._last is not None and self._last[0] != layer:
            self._record_last()
        self._last = layer, x

    def _record_last(self) -> None:
        if self._last is not None and self._summary is not None:
            layer, x = self._last
            self._recorded.append((layer, self._summary(x)))
        self._last = None

    def scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params, (consts, carry, xs) = eqn.params, split_loop_operands(eqn, operands)
        self._record_last()
        layers: list[str] = []

        # Summaries are tracers in the scan's body, so return them as additional outputs.
        def body(
            carry: tuple[Any, ...], xs: list[Any]
        ) -> tuple[tuple[Any, ...], tuple[list[Any], list[jax.Array]]]:
            outs, layers[:], summaries = self._record_separately(
                params["jaxpr"], [*consts, *carry, *xs]
            )
            return tuple(outs[: len(carry)]), (outs[len(carry) :], summaries)

        last, (ys, summaries) = lax.scan(
            body,
            tuple(map(jnp.asarray, carry)),
            list(map(jnp.asarray, xs)),
            params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        iterations = range(params["length"])
        if len(iterations) > _MAX_ITERATIONS:
            self._recorded += zip(layers, summaries, strict=True)
            return [*last, *ys]
        for i in reversed(iterations) if params["reverse"] else iterations:
            self._recorded += [(layer, x[i]) for layer, x in zip(layers, summaries, strict=True)]
        return [*last, *ys]

    def _record_separately(
        self, jaxpr: Any, args: Sequence[Any]
    ) -> tuple[list[Any], list[str], list[jax.Array]]:
        """Runs a jaxpr, and returns its outputs and the layers and summaries recorded in it."""
        outer, self._recorded = self._recorded, []
        outs = self.call(jaxpr, args)
        self._record_last()
        inner, self._recorded = self._recorded, outer
        return outs, [name for name, _ in inner], [x for _, x in inner]

    def while_loop(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params, (of_cond, of_body, carry) = eqn.params, split_loop_operands(eqn, operands)

        def cond(values: tuple) -> Any:
            return self._unrecorded(params["cond_jaxpr"], [*of_cond, *values])[0]

        def body(values: tuple) -> tuple:
            return tuple(self._unrecorded(params["body_jaxpr"], [*of_body, *values]))

        initial: tuple[Any, ...] = tuple(map(jnp.asarray, carry))
        last: tuple[Any, ...] = lax.while_loop(cond, body, initial)
        return list(last)

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
        self._record_last()
        layers: list[str] = []

        # Each device adds a leading dim to its summaries, along which they are concatenated.
        def body(values: tuple) -> tuple:
            outs, layers[:], summaries = self._record_separately(eqn.params["jaxpr"], values)
            return tuple(outs), [x[None] for x in summaries]

        run = run_shard_map(eqn, body, extra_out_specs=[PartitionSpec(axes)])
        outs, summaries = run(tuple(operands))
        for layer, x in zip(layers, summaries, strict=True):
            self._recorded += [(layer, of_device) for of_device in x]
        return list(outs)

    def _unrecorded(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        # Values inside a while loop or a branch are tracers that must not be used outside of it.
        before, self._is_recording = self._is_recording, False
        outs = self.call(jaxpr, args)
        self._is_recording = before
        return outs


def _user_line(eqn: Any) -> str:
    """Returns the innermost user source line of an operation, such as "my_model.py:12", or ""."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else [(x.file_name, x.line_num) for x in traceback.frames]
    user_frames = [x for x in own_frames(frames) if not x[0].startswith(LIBRARY_FOLDERS)]
    return f"{os.path.basename(user_frames[0][0])}:{user_frames[0][1]}" if user_frames else ""
