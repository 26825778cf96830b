"""Small steps on disk for the tests of the tools: hand-made states, saved as a job saves them."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import MeshConfig, StateLayout, TrainState, make_mesh

# Uneven on all of these but the one of a single device.
MESHES = [(1, 4, 2), (1, 3, 2), (2, 2, 2), (1, 1, 1), (1, 2, 4), (8, 1, 1)]
SPECS = TrainState(
    P(),
    {
        "params": {
            "emb": P(("replica", "data"), "mdl"),
            "layer": {"w": P("mdl", None), "b": P(("data", "mdl")), "even": P("data", "mdl")},
        },
        "non_trainable": {},
    },
    {
        "num_updates": P(),
        "flags": P("replica"),
        "slots": {"unstacked": [{"count": P()}, {}, {"mu": P("data", None)}]},
    },
)


@functools.cache
def true_state() -> TrainState:
    """Returns NumPy arrays of many dtypes and ranks, most of prime sizes; to look at."""
    rng = np.random.default_rng(11)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    params = {
        "emb": draw(37, 7),
        "layer": {"w": draw(7, 13).astype(ml_dtypes.bfloat16), "b": draw(13), "even": draw(24, 8)},
    }
    slots = {"unstacked": [{"count": np.int32(3)}, {}, {"mu": draw(37, 7).astype(np.float16)}]}
    flags = np.array([True, False, True, True, False])
    return TrainState(
        np.int32(0),
        {"params": params, "non_trainable": {}},
        {"num_updates": np.uint32(2**32 - 5), "flags": flags, "slots": slots},
    )


def save_steps(
    folder: Path,
    states: Mapping[int, TrainState],
    *,
    mesh_shape: Sequence[int] = (1, 4, 2),
    specs: TrainState = SPECS,
    data: Mapping[str, int] | None = None,
    padding: int = 0,
) -> Path:
    """Returns the folder, in which the states are saved by step, padded by NumPy."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=tuple(mesh_shape)))
    axis_sizes = dict(zip(("replica", "data", "mdl"), mesh_shape, strict=True))

    def place(x: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        padded = np.full(abstract.shape, padding, abstract.dtype)
        padded[tuple(slice(dim) for dim in x.shape)] = x
        return jax.device_put(padded, abstract.sharding)

    saving = SaveSettings(max_to_keep=9, save_non_finite=True)
    with Checkpoints(folder, saving=saving) as checkpoints:
        for step, state in states.items():
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
            layout = StateLayout(shapes, specs, axis_sizes)
            placed = jax.tree.map(place, state, layout.abstract(mesh))
            checkpoints.save(step, placed, layout, data or {}, {"heldout/loss": step / 2})
    return folder
