"""DpoTask: direct preference optimization on pairs of chosen and rejected answers."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core import WeightedScalars, require, share_outputs
from praxis_lite.layers import reference_of
from praxis_lite.tasks.language_model import LanguageModelTask, require_unpacked

__all__ = ["DpoTask"]

# B pairs, T time. In dims of size 2, the chosen answer comes first.


class DpoTask(LanguageModelTask):
    """Trains a language model with DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    Batches contain `ids` and `labels` int32 [B, 2, T], `answers` float32 [B, 2, T], which is 1 for
    labels that belong to the answer, and `weights` float32 [B]. The reference model is either the
    model without its adapters or the frozen copy that `with_reference` creates. The layers'
    auxiliary losses, such as load balancing, are ignored. Decoding is the same as in
    `LanguageModelTask`.

    Both models run in evaluation mode, because different dropout masks would make them differ. TRL
    does the same (`disable_dropout=True`).

    Args:
      args: Positional arguments of LanguageModelTask.
      beta: Weight of the implicit KL penalty. Smaller values allow the model to move farther away
        from the reference.
      label_smoothing: Assumed fraction of pairs with swapped labels, below 0.5 (Mitchell 2023,
        conservative DPO).
      settings: Keyword arguments of LanguageModelTask.
    """

    weight_unit = "pairs"
    required_inputs = ("ids", "labels", "answers", "weights")

    def __init__(
        self, *args: Any, beta: float = 0.1, label_smoothing: float = 0.0, **settings: Any
    ):
        super().__init__(*args, **settings)
        require(beta > 0, "DpoTask.beta", beta, "a number above 0")
        is_share = 0 <= label_smoothing < 0.5
        require(is_share, "DpoTask.label_smoothing", label_smoothing, "at least 0, below 0.5")
        self.beta, self.label_smoothing = beta, label_smoothing
        require(
            self.learner.variational_noise is None,
            "DpoTask.learner.variational_noise",
            self.learner.variational_noise,
            "None",
            "Noise on the weights of the model but not of the reference would distort the loss.",
        )

    def module(
        self, mdl_vars: Any, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> Any:
        """Returns the module in evaluation mode, even in training."""
        return super().module(mdl_vars, None, key if eval_key is None else eval_key)

    def compute_loss(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns metrics with TRL's names, each a mean over pairs.

        "loss" is the DPO loss. "rewards/chosen" and "rewards/rejected" are beta times the
        difference between the log-probabilities (in nats) of an answer under the model and under
        the reference. "rewards/margins" is the difference of these rewards. "rewards/accuracies" is
        the fraction of pairs whose margin exceeds rounding errors. This fraction is 0 before
        training, when the model equals the reference.
        """
        require_unpacked(inputs, "DpoTask reads one answer per row")
        reference_log_probs = jax.lax.stop_gradient(_log_probs(reference_of(model), inputs))
        log_probs = _log_probs(model, inputs)
        rewards = self.beta * (log_probs - reference_log_probs)
        margins = rewards[:, 0] - rewards[:, 1]
        magnitudes = jnp.sum(jnp.abs(log_probs) + jnp.abs(reference_log_probs), axis=-1)
        rounding = 16 * jnp.finfo(magnitudes.dtype).eps * self.beta * magnitudes
        correct, swapped = jax.nn.log_sigmoid(margins), jax.nn.log_sigmoid(-margins)
        per_pair = {
            "loss": -(1 - self.label_smoothing) * correct - self.label_smoothing * swapped,
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/margins": margins,
            "rewards/accuracies": (margins > rounding).astype(jnp.float32),
        }
        share_outputs({**per_pair, "log_probs": log_probs})
        weights = inputs["weights"].astype(jnp.float32)
        total = jnp.sum(weights)
        divisor = jnp.maximum(total, 1e-9)
        return {name: (jnp.sum(x * weights) / divisor, total) for name, x in per_pair.items()}


def _log_probs(model: Any, inputs: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the log-probabilities [B, 2] of the answers in nats."""
    ids, labels, answers = (
        inputs[name].reshape(-1, inputs[name].shape[-1]) for name in ("ids", "labels", "answers")
    )
    outputs = model.compute_loss(ids, labels, answers, key=None)
    return -outputs["per_sequence_xent"].reshape(-1, 2)
