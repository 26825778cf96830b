"""The gradient of overlapping maxima is wrong where the array is split along the windows.

Prints the expected and the actual numbers. `python maxima_gradient.py gspmd` takes the former
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
    def loss(x):
        x = split(x, None, "data", None, None)
        window = {"window_dimensions": (1, 3, 3, 1), "window_strides": (1,) * 4, "padding": "SAME"}
        return jnp.sum(jnp.sin(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **window)))

    return jax.grad(loss)


def results(jit=jax.jit):
    """Returns the gradient, as expected and as computed."""
    x = np.random.default_rng(1).normal(size=(2, 8, 4, 1)).astype(np.float32)
    with jax.set_mesh(mesh_of(data=2, mdl=1)):
        actual = jit(gradient(constrain))(x)
    return gradient(unconstrained)(x), actual


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
