"""The filter's gradient of a depthwise convolution is wrong where an axis is left over.

Prints the expected and the actual numbers. `python filter_gradient.py gspmd` takes the former
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


def unconstrained(x, *spec):
    return x


def gradient(split):
    def loss(w, x):
        x = split(x * 1.5, "data")
        y = jax.lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            feature_group_count=12,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.sum(jnp.sin(split(y, "data")))

    return jax.grad(loss)


def results(jit=jax.jit):
    """Returns the filter's gradient, as expected and as computed."""
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((3, 3, 1, 12), (6, 4, 4, 12)))
    with jax.set_mesh(mesh_of(data=3, mdl=2)):
        actual = jit(gradient(constrain))(w, x)
    return gradient(unconstrained)(w, x), actual


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
