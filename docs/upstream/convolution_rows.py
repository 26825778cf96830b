"""A convolution over three axes permutes the rows of its result.

Prints the expected and the actual numbers. `python convolution_rows.py gspmd` takes the former
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


def unconstrained(x, *spec):
    return x


def convolved(split):
    def f(x, w):
        x = split(x, ("replica", "data"), None, None, "mdl")
        w = split(w, None, None, "mdl", "data")
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return split(y, ("replica", "data"), None, None, "mdl")

    return f


def results(jit=jax.jit):
    """Returns the images, as expected and as computed."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((8, 4, 4, 12), (3, 3, 12, 12)))
    with jax.set_mesh(mesh_of(replica=2, data=2, mdl=2)):
        actual = jit(convolved(constrain))(x, w)
    return convolved(unconstrained)(x, w), actual


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
