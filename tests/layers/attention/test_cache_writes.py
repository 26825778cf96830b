"""A token's entries in a cache, as a TPU writes them, against NumPy; computed on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.core import MeshConfig, make_mesh
from praxis_lite.layers.attention import kv_cache as caches

B, G, S, K = 6, 4, 11, 3
PLACES = [0, 10, 3, 11, 7, 7]  # The fourth is past the end: nothing is written.


def by_hand(old, new):
    result = np.array(old)
    for b, place in enumerate(PLACES):
        if place < old.shape[-2]:
            result[b, ..., place, :] = new[b, ..., 0, :]
    return result


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        ((B, G, S, K), ("data", "mdl", None, None)),
        ((B, G, S, K), None),
        ((B, 3, S, K), ("data", "mdl", None, None)),  # Heads that do not divide.
        ((B, G, 12, K), (None, "data", "mdl", None)),  # Time is split.
        ((B, S, K), ("data", None, None)),  # Latents have no heads.
    ],
)
@pytest.mark.parametrize("has_mesh", [True, False])
def test_a_tpus_scatter_writes_each_rows_entry_in_its_place(shape, split, has_mesh, monkeypatch):
    monkeypatch.setattr(caches, "compiled_platform", lambda: "tpu")
    rng = np.random.default_rng(0)
    old = rng.normal(size=shape).astype(np.float32)
    new = rng.normal(size=(*shape[:-2], 1, K)).astype(np.float32)
    write = jax.jit(lambda *args: caches.write_entries(*args, split))
    if not has_mesh:
        actual = write(old, new, jnp.asarray(PLACES))
    else:
        mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 2, 2)), jax.devices()[:4])
        whole = NamedSharding(mesh, PartitionSpec())
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            actual = write(*jax.device_put((old, new, np.asarray(PLACES)), whole))
    np.testing.assert_array_equal(actual, by_hand(old, new))
