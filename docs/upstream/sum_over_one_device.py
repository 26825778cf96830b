"""A sum by hand over an axis of one device does not compile beside an axis of the compiler.

Prints the expected and the actual numbers. `python sum_over_one_device.py gspmd` takes the former
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


def gradient(w):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(w)))(w)


def f(w):
    def summed(w):
        return jax.lax.psum(gradient(w), "data")

    w = constrain(w, None, "mdl")
    return jax.shard_map(summed, axis_names={"data"}, in_specs=P(), out_specs=P())(w)


def results(jit=jax.jit):
    """Returns the gradient, as expected and as computed; today compiling it raises an error."""
    w = np.ones((4, 6), np.float32)
    with jax.set_mesh(mesh_of(data=1, mdl=2)):
        actual = jit(f)(w)
    return gradient(w), actual


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_use_shardy_partitioner", "gspmd" not in sys.argv)
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
