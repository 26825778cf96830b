"""Scalars that are packed for the way to the host are the same numbers there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.trainer.metrics.packed import pack_scalars

SCALARS = {
    "float32": np.float32(1 / 3),
    "nan": np.float32("nan"),
    "-inf": np.float32("-inf"),
    "float16": np.float16(1 / 3),
    "bfloat16": jnp.bfloat16(1 / 3),
    # Neither is a float32.
    "int32": np.int32(2**24 + 1),
    "uint32": np.uint32(2**32 - 1),
    "int8": np.int8(-7),
    "uint8": np.uint8(255),
    "true": np.bool_(True),
    "false": np.bool_(False),
}


def on(sharding, tree):
    return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2)])
def test_each_scalar_comes_back_with_its_value_and_dtype_in_an_array_per_dtype(shape, mesh_of):
    replicated = NamedSharding(mesh_of(*shape), PartitionSpec())
    tree = {
        "metrics": {name: (x, np.float32(i)) for i, (name, x) in enumerate(SCALARS.items())},
        "learner": {"num_skipped_steps": np.int32(2**31 - 1)},
    }
    result = pack_scalars(on(replicated, tree))
    assert len(result.arrays) == len({np.asarray(x).dtype for x in jax.tree.leaves(tree)})
    assert all(x.sharding == replicated for x in result.arrays)
    actual = result.to_host()
    assert jax.tree.structure(actual) == jax.tree.structure(tree)
    for x, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(tree), strict=True):
        assert x.dtype == expected.dtype and np.shape(x) == ()
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("tree", [{}, {"a": np.float32(1)}, {"a": jnp.ones(3), "b": jnp.ones(())}])
def test_a_tree_with_anything_but_scalars_on_devices_comes_back_as_it_is(tree):
    actual = pack_scalars(tree).to_host()
    assert jax.tree.structure(actual) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, actual, tree)
