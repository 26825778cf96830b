"""Eight simulated devices for every test; rank promotion raises; warnings are errors."""

import jax
import pytest

from praxis_lite.sharding import MeshConfig, make_mesh, simulate_devices

simulate_devices(8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def mesh_of():
    """Returns a function from an ICI shape to a mesh with axes replica, data, mdl."""

    def mesh(*shape: int, axis_names=("replica", "data", "mdl")):
        return make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=axis_names))

    return mesh
