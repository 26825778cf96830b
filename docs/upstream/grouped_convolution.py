"""A convolution of groups is wrong where a split of its channels cuts a group.

Prints the expected and the actual numbers. `python grouped_convolution.py gspmd` takes the former
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
        x, w, (1,), "VALID", feature_group_count=3, dimension_numbers=("NWC", "WIO", "NWC")
    )


def results(jit=jax.jit):
    """Returns the sum of each group, twice, as expected and as computed."""

    def split(x, w):
        x = jax.lax.with_sharding_constraint(x, P(None, None, "mdl"))
        return jax.lax.with_sharding_constraint(convolved(x, w), P(None, None, "mdl"))

    x, w = jnp.arange(1.0, 7).reshape(1, 1, 6), jnp.ones((1, 2, 6))
    with jax.set_mesh(mesh_of(mdl=2)):
        actual = jit(split)(x, w)
    return convolved(x, w), actual


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
