"""A job that only computes matmuls, whose number sets the step time (for run_overhead.py)."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite import Experiment, MeshConfig, RunConfig
from praxis_lite.core import Learner
from praxis_lite.inputs import InMemory
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

DIMS, ROWS = 192, 192


def inputs():
    """Returns the arrays of a dataset with a single batch, which every step trains on."""
    return {"inputs": np.random.default_rng(0).normal(size=(ROWS, DIMS)).astype(np.float32)}


def init(key, num_layers):
    """Returns the weights."""
    return {"w": jax.random.normal(key, (num_layers, DIMS, DIMS)) / DIMS**0.5}


def loss(params, inputs, key):
    """Returns the loss of each row, [B]."""
    outputs = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), inputs["inputs"], params["w"])[0]
    return jnp.mean(jnp.square(outputs), axis=-1)


class Matmuls(Experiment):
    """Trains a given number of square matmuls on a single device."""

    num_layers = 8

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 1, 1))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.sgd), learning_rate=1e-3)
        model = fdl.Config(FunctionModel, fdl.Partial(init, num_layers=self.num_layers))
        return fdl.Config(LossTask, model, loss, learner)

    def datasets(self):
        return {"train": fdl.Config(InMemory, inputs, ROWS, shuffle=True)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=1)
