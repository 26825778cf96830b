"""Data parallelism with explicit collectives: an LM, and a classifier from a JAX notebook."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from praxis_lite import EvaluationSettings, Experiment, MeshConfig, RunConfig, register
from praxis_lite.core import Learner, Partitioner, WeightSharding
from praxis_lite.core.collectives import ExplicitCollectives
from praxis_lite.experiments.lm import PyDocs as LayersPyDocs
from praxis_lite.experiments.vision import Digits
from praxis_lite.inputs import InMemory
from praxis_lite.models import LinenModel
from praxis_lite.tasks.loss import LossTask

__all__ = [
    "Classifier",
    "DigitsDp",
    "DigitsFsdp",
    "NotebookDp",
    "NotebookFsdp",
    "PyDocs",
    "loss",
    "random_rows",
]


class Classifier(nn.Module):
    """The classifier of JAX's shard_map notebook: two dense layers without annotations."""

    hidden_size: int = 512
    dropout_rate: float = 0.1
    dtype: jnp.dtype = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = x.reshape(len(x), -1)
        x = nn.silu(nn.Dense(self.hidden_size, dtype=self.dtype, name="input_dense")(x))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(10, dtype=self.dtype, name="output_dense")(x).astype(jnp.float32)


def random_rows():
    """Returns random inputs [128, 784] and labels [128], as in the notebook."""
    _, inputs, labels = jax.random.split(jax.random.key(42), 3)
    return {
        "inputs": np.asarray(jax.random.normal(inputs, (128, 784))),
        "labels": np.asarray(jax.random.randint(labels, (128,), 0, 10)),
    }


def loss(model, inputs, key):
    """Returns the cross-entropy in nats per row [B], and the accuracy as a metric."""
    logits, labels = model(inputs["inputs"]), inputs["labels"]
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return xent, {"accuracy": jnp.argmax(logits, axis=-1) == labels}


@register
class NotebookDp(Experiment):
    """Data parallelism on 8 devices, with a single all-reduce for four microbatches."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(8,), axis_names=("data",))

    def task(self):
        model = fdl.Config(LinenModel, fdl.Config(Classifier), {"x": (1, 784)})
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw),
            learning_rate=1e-3,
            gradient_accumulation_steps=4,
        )
        return fdl.Config(LossTask, model, loss, learner)

    def datasets(self):
        return {"train": fdl.Config(InMemory, random_rows, batch_size=128, shuffle=True)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=16)

    def partitioner(self):
        return fdl.Partial(Partitioner, gradients=fdl.Config(ExplicitCollectives))


@register
class NotebookFsdp(NotebookDp):
    """NotebookDp with FSDP: weights with more than 16 elements are gathered when they are used."""

    def task(self):
        task = super().task()
        rule = (".*", 'fsdp("data", min_weight_size=16)')
        task.weight_sharding = fdl.Config(WeightSharding, strategy=(rule,))
        return task


@register
class DigitsDp(NotebookDp):
    """Classifies digits; batches are padded to split evenly over devices and microbatches."""

    def task(self):
        task = super().task()
        task.model.init_inputs = {"x": (1, 8, 8, 1)}
        return task

    def datasets(self):
        return Digits.datasets(self)

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=300,
            evaluation=fdl.Config(EvaluationSettings, every_steps=100),
        )


@register
class DigitsFsdp(DigitsDp):
    """DigitsDp with FSDP and a prime hidden dim."""

    def task(self):
        task = super().task()
        task.model.module.hidden_size = 509
        task.weight_sharding = fdl.Config(WeightSharding, strategy=((".*", 'fsdp("data", 0)'),))
        return task


@register
class PyDocs(LayersPyDocs):
    """lm.PyDocs with explicit 4-way FSDP and compiler-partitioned 2-way tensor parallelism."""

    def partitioner(self):
        collectives = fdl.Config(ExplicitCollectives, data_axes=("replica", "data"))
        return fdl.Partial(Partitioner, gradients=collectives)
