"""Trains a model of plain functions (`init`, `loss`, `predict`) on a mesh, without modules."""

import itertools

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax

from praxis_lite import EvaluationSettings, Experiment, MeshConfig, RunConfig, register
from praxis_lite.core import Learner, WeightSharding
from praxis_lite.experiments.vision import Digits
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

__all__ = ["DigitsMlp", "DigitsMlpFsdp", "init", "loss", "predict"]

SIZES = (64, 131, 67, 10)  # Pixels, hidden dims (primes, to require padding), digits.
# PartitionSpecs with the structure of the params; None for weights or layers without a spec.
SPECS = [{"w": ("data", "mdl"), "b": ("mdl",)}, {"w": ("mdl", "data"), "b": None}, None]


def init(key):
    """Returns the params of an MLP: a list of layers."""
    return [
        {"w": jax.random.normal(jax.random.fold_in(key, n), (n, m)) * n**-0.5, "b": jnp.zeros(m)}
        for n, m in itertools.pairwise(SIZES)
    ]


def mlp(params, images, key=None):
    """Returns logits [B, 10] for images [B, 8, 8, 1]; with a key, drops out 10% of the pixels."""
    x = images.reshape(len(images), -1)
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return x @ params[-1]["w"] + params[-1]["b"][None]


def loss(params, inputs, key):
    """Returns the cross-entropy in nats per image [B], and the accuracy as a metric."""
    logits, labels = mlp(params, inputs["inputs"], key), inputs["labels"]
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return xent, {"accuracy": jnp.argmax(logits, axis=-1) == labels}


def predict(params, inputs, key):
    """Returns the predicted digit and the label of each image."""
    return {"digit": jnp.argmax(mlp(params, inputs["inputs"]), -1), "label": inputs["labels"]}


@register
class DigitsMlp(Experiment):
    """Classifies handwritten digits with an MLP of plain functions, sharded by a tree of specs."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def task(self):
        model = fdl.Config(FunctionModel, init, specs=SPECS)
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.adamw), learning_rate=3e-3)
        batch = (("replica", "data"),)
        return fdl.Config(
            LossTask,
            model,
            loss,
            learner,
            predict=predict,
            inputs_split_mapping={"map_1d": batch, "map_4d": batch},
        )

    def datasets(self):
        return Digits.datasets(self)

    def decode_datasets(self):
        return {"heldout": self.datasets()["heldout"]}

    def run(self):
        evaluation = fdl.Config(EvaluationSettings, every_steps=100)
        return fdl.Config(RunConfig, num_train_steps=300, evaluation=evaluation)


@register
class DigitsMlpFsdp(DigitsMlp):
    """DigitsMlp without specs: a rule shards weights larger than 1 KiB over all devices."""

    def task(self):
        task = super().task()
        task.model.specs = None
        task.inputs_split_mapping = None  # The default shards rows over all devices.
        rule = (".*", 'fsdp(("data", "mdl"), 0.001)')
        task.weight_sharding = fdl.Config(WeightSharding, strategy=(rule,))
        return task
