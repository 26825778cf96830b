"""A job that only computes matmuls, whose number sets the step time (for run_overhead.py)."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite import Experiment, MeshConfig, RunConfig
from praxis_lite.core import Learner
from praxis_lite.inputs.base import IndexedPipeline, spec_of
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

DIMS, ROWS = 192, 192


class Rows(IndexedPipeline):
    """A dataset that returns the same in-memory batch at every step."""

    def __init__(self, batch_size):
        self.batch_size = batch_size
        self._inputs = np.random.default_rng(0).normal(size=(batch_size, DIMS)).astype(np.float32)

    @property
    def num_batches(self):
        return None

    def element_spec(self):
        return spec_of(inputs=((self.batch_size, DIMS), np.float32))

    def fingerprint(self):
        return {"batch_size": self.batch_size}

    def rows(self, index, rows):
        return {"inputs": self._inputs[rows]}


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
        return {"train": fdl.Config(Rows, batch_size=ROWS)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=1)
