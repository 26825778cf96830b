"""ClassificationTask: cross-entropy training of models that return class logits."""

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
    """Trains a classifier, which maps inputs [B, ...] to logits [B, V], on the cross-entropy.

    Batches contain `inputs` [B, ...], `labels` int32 [B] and `weights` float32 [B]. If the model
    has a `compute_loss` method, this method is called instead of the model. If the model takes a
    `key`, it receives a key in training (for dropout and batch statistics) and None in evaluation.
    """

    required_inputs = ("inputs", "labels", "weights")

    def num_ids(self) -> dict[str, int]:
        """Returns the number of classes as the limit for `labels`, or {} if unknown."""
        if not isinstance(self.model, NnxModel):
            return {}
        module = self.model.abstract_module()
        num_classes = getattr(getattr(module, "softmax", module), "num_classes", None)
        return {"labels": num_classes} if isinstance(num_classes, int) else {}

    def compute_loss(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns the metrics "loss", "accuracy" and, if layers add an auxiliary loss, "aux_loss".

        All metrics are means over examples. The loss is in nats and includes the auxiliary loss.
        """
        labels, weights = inputs["labels"], inputs["weights"].astype(jnp.float32)
        num_examples = jnp.sum(weights)
        if hasattr(model, "compute_loss"):
            # The model's `compute_loss` applies the softmax's label smoothing, z-loss and chunking.
            outputs = model.compute_loss(inputs["inputs"], labels, weights, key=key)
        else:
            takes_key = "key" in inspect.signature(model).parameters
            logits = model(inputs["inputs"], **({"key": key} if takes_key else {}))
            outputs = outputs_of_logits(logits, labels, weights)
        share_outputs(outputs)
        metrics = {"loss": outputs["avg_xent"], "accuracy": outputs["accuracy"]}
        auxiliary = aux_loss(model) if isinstance(model, nnx.Module) else None
        if auxiliary is not None:
            metrics |= {"loss": metrics["loss"] + auxiliary, "aux_loss": auxiliary}
        return {name: (value, num_examples) for name, value in metrics.items()}
