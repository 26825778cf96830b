"""Values that must be equal on all devices inside a `jax.shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.core import MeshConfig, make_mesh
from praxis_lite.core.collectives.varying import on_any_device
from praxis_lite.layers.stacking.collective_matmul import gather_and_scatter


def mesh():
    return make_mesh(MeshConfig(ici_mesh_shape=(8,), axis_names=("data",)))


@pytest.mark.parametrize("is_open", [[], [3], [0, 7]])
def test_all_devices_go_on_while_a_row_of_any_device_is_open(is_open):
    flags = np.isin(np.arange(8), is_open)
    with_all = jax.shard_map(
        lambda flag: jnp.broadcast_to(on_any_device(flag[0]), (1,)),
        mesh=mesh(),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    assert jax.jit(with_all)(flags).tolist() == [bool(is_open)] * 8


def test_partial_sums_of_tokens_that_all_devices_have_are_added():
    x, w = np.arange(3.0, dtype=np.float32), np.arange(8.0, dtype=np.float32)
    product = jax.shard_map(
        lambda x, w: gather_and_scatter(lambda x, rows: x * w[0], x, None, "data", None),
        mesh=mesh(),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.jit(product)(x, w), x * w.sum())
