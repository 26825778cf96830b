"""A small task with ZeRO-1, compiled for this machine or, run as a module, for an absent TPU."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from praxis_lite import Task
from praxis_lite.core import Learner, Partitioner
from praxis_lite.core.sharding.devices.axis_types import mesh_of
from praxis_lite.layers import BaseLayer
from praxis_tools.explain import hlo

MODEL_DIMS, HIDDEN_DIMS, NUM_DEVICES = 256, 1024, 8
NUM_WEIGHTS = 2 * MODEL_DIMS * HIDDEN_DIMS
# The TPU's compiler may also pass the parts round while it multiplies; this shows them by name.
TPU_OPTIONS = {"xla_tpu_enable_windowed_einsum_for_reduce_scatter": False}


class FeedForward(BaseLayer):
    def __init__(self, *, rngs: nnx.Rngs):
        self.wi = self.weight((MODEL_DIMS, HIDDEN_DIMS), rngs=rngs)
        self.wo = self.weight((HIDDEN_DIMS, MODEL_DIMS), rngs=rngs)


class Regression(Task):
    def compute_loss(self, model, inputs, key):
        x = jnp.tanh(inputs["x"] @ model.wi[...]) @ model.wo[...]
        return {"loss": (jnp.mean((x - inputs["x"]) ** 2), jnp.float32(1.0))}


def compiled_step(mesh, slot_mesh_axes, compiler_options=None):
    """Returns the partitioner and the compiled train step."""
    learner = Learner(
        functools.partial(optax.adamw, weight_decay=0.1),
        0.1,
        clip_gradient_norm_to_value=1.0,
        slot_mesh_axes=slot_mesh_axes,
    )
    task = Regression(FeedForward, learner, inputs_split_mapping={"map_2d": ("data", None)})
    partitioner = Partitioner(task, mesh)
    batch = {"x": jax.ShapeDtypeStruct((16 * NUM_DEVICES, MODEL_DIMS), "float32")}
    lowered = partitioner.train_step.lower(batch)
    return partitioner, lowered.compile(compiler_options=compiler_options)


def main():
    """Prints {kind: bytes} of a TPU's collectives, without and with ZeRO-1, as JSON."""
    from jax.experimental import mesh_utils, topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    devices = mesh_utils.create_device_mesh((NUM_DEVICES,), topology.devices)
    mesh = mesh_of(devices, ("data",))
    actual = []
    for axes in ((), ("data",)):
        _, compiled = compiled_step(mesh, axes, TPU_OPTIONS)
        totals = hlo.summarize(hlo.collectives(compiled))
        actual.append({kind: size for kind, (_, size) in totals.items()})
    print(json.dumps(actual))


if __name__ == "__main__":
    sys.exit(main())
