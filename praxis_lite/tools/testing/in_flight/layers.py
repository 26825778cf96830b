"""The first layer in which a step differs between two placements: bit by bit, or in float64."""

from typing import Any

import jax
import numpy as np

from praxis_lite.tools.explain.hlo_layers import GRADIENT_OF
from praxis_lite.tools.testing.bisect import first_of_layers, layer_of_key
from praxis_lite.tools.testing.in_flight import element_hash
from praxis_lite.tools.testing.in_flight.rerun import Rerun, Rows
from praxis_lite.tools.testing.runs.float64 import Float64Run, widened
from praxis_lite.tools.testing.runs.layer_recorder import LayerRecorder
from praxis_lite.tools.testing.runs.on_mesh import Leaves
from praxis_lite.tools.testing.runs.states import NUDGE


def first_layer_moved(one: Rerun, other: Rerun, rows: Rows) -> str:
    """Returns the layer whose bits differ first between two orders of the devices, or ""."""

    def digest(x: jax.Array) -> jax.Array:
        return element_hash.digest(x, element_hash.indices(x.shape, x.shape))

    expected, actual = (_records(item, rows, LayerRecorder(digest)) for item in (one, other))
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
    by_hand = actual.partitioner.gradients.num_parts is not None
    with jax.enable_x64(True):
        return first_of_layers(
            _records(expected, rows, Float64Run()), _records(expected, rows, Float64Run(), NUDGE),
            _records(actual, rows, Float64Run()), (GRADIENT_OF,) if by_hand else (),
        )


def _records(rerun: Rerun, rows: Rows, run: LayerRecorder, nudge: float = 0.0) -> Leaves:
    """Returns the records of a step's layers, by "NUMBER|LAYER"."""
    with jax.enable_x64(False):
        given = rerun.arguments(rows, nudge)
        closed = jax.make_jaxpr(rerun.function)(*given)

    def recorded(*args: Any) -> dict[str, jax.Array]:
        leaves = jax.tree.leaves(args)
        run.call(closed, list(map(widened, leaves)) if isinstance(run, Float64Run) else leaves)
        return run.records

    return jax.device_get(jax.jit(recorded, out_shardings=rerun.partitioner.replicated)(*given))
