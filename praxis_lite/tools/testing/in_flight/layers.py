"""The first layer in which a step differs between two placements: bit by bit, or in float64."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from praxis_lite.tools.explain.hlo_layers import GRADIENT_OF
from praxis_lite.tools.interpreter import CALLS, Interpreter, bound
from praxis_lite.tools.testing.bisect import first_of_layers, layer_of_key
from praxis_lite.tools.testing.in_flight import element_hash
from praxis_lite.tools.testing.in_flight.rerun import Rerun, Rows
from praxis_lite.tools.testing.runs.float64 import Run, widened
from praxis_lite.tools.testing.runs.on_mesh import Leaves
from praxis_lite.tools.testing.runs.states import NUDGE


class _InOwnTypes(Run):
    """A run as it is trained, with digests of what layers compute."""

    def __init__(self):
        super().__init__(without_randomness=False, by_layer=True)

    def fingerprint(self, x: jax.Array) -> jax.Array:
        return element_hash.digest(x, element_hash.indices(x.shape, x.shape))

    def constant(self, value: Any, aval: Any) -> Any:
        return value if isinstance(value, jax.Array) else np.asarray(value, aval.dtype)

    def results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        results = Interpreter.results(self, eqn, operands)
        if self._by_layer and results and eqn.primitive.name not in CALLS:
            self._look_at(eqn, results[-1])
        return results

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        return bound(eqn, operands)


def first_layer_moved(one: Rerun, other: Rerun, rows: Rows) -> str:
    """Returns the layer whose bits differ first between two orders of the devices, or ""."""
    expected, actual = (_seen(item, rows, _InOwnTypes, 0.0) for item in (one, other))
    for key in sorted(expected):
        layer = layer_of_key(key).removeprefix(GRADIENT_OF)
        if layer and key in actual and not np.array_equal(expected[key], actual[key]):
            return layer
    return ""


def first_layer_of_mesh(expected: Rerun, actual: Rerun, rows: Rows) -> str:
    """Returns the layer that differs first between two meshes in float64, or "".

    It is "" too on devices that have no float64.
    """
    if expected.mesh.devices.flat[0].platform == "tpu":
        return ""
    wide = lambda: Run(without_randomness=False, by_layer=True)  # noqa: E731
    by_hand = actual.partitioner.gradients.num_parts is not None
    with jax.enable_x64(True):
        return first_of_layers(
            _seen(expected, rows, wide, 0.0), _seen(expected, rows, wide, NUDGE),
            _seen(actual, rows, wide, 0.0), (GRADIENT_OF,) if by_hand else (),
        )


def _seen(rerun: Rerun, rows: Rows, run_of: Callable[[], Run], nudge: float) -> Leaves:
    """Returns the records of a step's layers, by "NUMBER|LAYER"."""
    with jax.enable_x64(False):
        given = rerun.arguments(rows, nudge)
        closed = jax.make_jaxpr(rerun.function)(*given)

    def recorded(*args: Any) -> dict[str, jax.Array]:
        run = run_of()
        is_wide = not isinstance(run, _InOwnTypes)
        leaves = jax.tree.leaves(args)
        run.call(closed, [widened(x) for x in leaves] if is_wide else leaves)
        return {f"{i:06d}|{name}": x for i, (name, x) in enumerate(run.seen)}

    return jax.device_get(jax.jit(recorded, out_shardings=rerun.partitioner.replicated)(*given))
