"""A matrix product whose outputs split their rows in another order permutes them.

Prints the expected and the actual numbers. `python matmul_rows.py gspmd` takes the former
partitioner.
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def mesh_of(**axes):
    types, devices = (AxisType.Auto,) * len(axes), jax.devices()[: np.prod((*axes.values(),))]
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=types, devices=devices)


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, P(*spec))


def f(x, w):
    x, w = constrain(x, ("replica", "data"), "mdl"), constrain(w, "mdl", None)
    return constrain(x @ w, ("data", "replica"), "mdl")


def results(jit=jax.jit):
    """Returns the product, whose rows are 1, 5, 9 and 13, as expected and as computed."""
    x, w = np.arange(8, dtype=np.float32).reshape(4, 2), np.ones((2, 2), np.float32)
    with jax.set_mesh(mesh_of(replica=2, data=2, mdl=2)):
        actual = jit(f)(x, w)
    return x @ w, actual


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
