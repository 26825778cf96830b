"""Classification of images, or of anything that a model maps to class logits."""

import inspect
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from praxis_lite.task import Task, WeightedScalars


class ClassificationTask(Task):
    """Trains a model of (inputs [B, ...]) -> (logits [B, V]).

    Reads `inputs` [B, ...], `labels` int32 [B] and `weights` float32 [B]. A model whose call takes
    a `key` gets one in training (dropout, the batch's own statistics) and None in evaluation.
    """

    required_inputs = ("inputs", "labels", "weights")

    def compute_loss(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns loss (nats per example) and accuracy, weighted by examples."""
        takes_key = "key" in inspect.signature(model).parameters
        logits = model(inputs["inputs"], **({"key": key} if takes_key else {})).astype(jnp.float32)
        labels, weights = inputs["labels"], inputs["weights"].astype(jnp.float32)
        xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
        num_examples = jnp.sum(weights)
        divisor = jnp.maximum(num_examples, 1e-9)
        return {
            "loss": (jnp.sum(xent * weights) / divisor, num_examples),
            "accuracy": (jnp.sum(correct * weights) / divisor, num_examples),
        }
