"""A convolution whose places are split is summed over devices that hold the same.

Prints the expected and the actual numbers. `python convolution_places.py gspmd` takes the former
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


def convolved(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1,), "VALID", rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
    )


def results(jit=jax.jit):
    """Returns sums of x[i] and x[i + 2], as expected and as computed."""

    def split(x, w):
        x = jax.lax.with_sharding_constraint(x, P(None, "mdl"))
        w = jax.lax.with_sharding_constraint(w, P(None, None, "mdl"))
        return jax.lax.with_sharding_constraint(convolved(x, w), P())

    x, w = jnp.arange(1.0, 13).reshape(1, 12, 1), jnp.ones((2, 1, 6))
    with jax.set_mesh(mesh_of(data=2, mdl=2)):
        actual = jit(split)(x, w)
    return convolved(x, w)[0, :, 0], actual[0, :, 0]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
