"""A window takes over the filler of another window over the same array.

Prints the expected and the actual numbers. `python windows.py gspmd` takes the former
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


def f(x):
    x = constrain(x * 2.0, None, "data")
    return jnp.stack([jax.lax.cummax(x, 1), jnp.cumsum(x, 1)])


def results(jit=jax.jit):
    """Returns maxima and sums so far, as expected and as computed."""
    x = np.arange(1, 9, dtype=np.float32)[None]
    with jax.set_mesh(mesh_of(data=2, mdl=1)):
        actual = jit(f)(x)
    return np.stack([np.maximum.accumulate(2 * x, 1), np.cumsum(2 * x, 1)]), actual


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
