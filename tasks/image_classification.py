"""Classification of images, or of anything that a model maps to class logits."""

import inspect
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core import NnxModel, Task, WeightedScalars, share_outputs
from praxis_lite.layers import aux_loss
from praxis_lite.tasks.language_model import outputs_of_logits

__all__ = ["ClassificationTask"]


class ClassificationTask(Task):
    """Trains a model of (inputs [B, ...]) -> (logits [B, V]), or one with a `compute_loss`.

    Reads `inputs` [B, ...], `labels` int32 [B] and `weights` float32 [B]. A model whose call takes
    a `key` gets one in training (dropout, the batch's own statistics) and None in evaluation.
    """

    required_inputs = ("inputs", "labels", "weights")

    def num_ids(self) -> dict[str, int]:
        """Returns how many classes the model's softmax has, for labels, or {} if not known."""
        if not isinstance(self.model, NnxModel):
            return {}
        module = self.model.abstract_module()
        num_classes = getattr(getattr(module, "softmax", module), "num_classes", None)
        return {"labels": num_classes} if isinstance(num_classes, int) else {}

    def compute_loss(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns metrics, weighted by examples.

        loss: nats per example, with the layers' aux_loss, which is then a metric too; accuracy.
        """
        labels, weights = inputs["labels"], inputs["weights"].astype(jnp.float32)
        num_examples = jnp.sum(weights)
        if hasattr(model, "compute_loss"):
            # With its softmax's label smoothing, z-loss and chunks.
            outputs = model.compute_loss(inputs["inputs"], labels, weights, key=key)
        else:
            takes_key = "key" in inspect.signature(model).parameters
            logits = model(inputs["inputs"], **({"key": key} if takes_key else {}))
            outputs = outputs_of_logits(logits, labels, weights)
        share_outputs(outputs)
        metrics = {"loss": outputs["avg_xent"], "accuracy": outputs["accuracy"]}
        added = aux_loss(model) if isinstance(model, nnx.Module) else None
        if added is not None:
            metrics |= {"loss": metrics["loss"] + added, "aux_loss": added}
        return {name: (value, num_examples) for name, value in metrics.items()}
