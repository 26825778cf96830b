"""A scatter-add into a split array adds the filler of unevenly split updates at 0.

Prints the expected and the actual numbers. `python scatter.py gspmd` takes the former
partitioner.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def mesh_of(**axes):
    types, devices = (AxisType.Auto,) * len(axes), jax.devices()[: np.prod((*axes.values(),))]
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=types, devices=devices)


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, P(*spec))


def f(ids, updates):
    ids, updates = constrain(ids, "data"), constrain(updates, "data") + 1.0
    return constrain(jnp.zeros(4).at[ids].add(updates), "mdl")


def results(jit=jax.jit):
    """Returns the sums by id, as expected and as computed."""
    with jax.set_mesh(mesh_of(data=3, mdl=2)):
        actual = jit(f)(np.array([1, 2, 3, 1], np.int32), np.ones(4, np.float32))
    return np.array([0.0, 4.0, 2.0, 2.0]), actual


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
