"""Direct preference optimization: a model learns which of two answers people prefer."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core import WeightedScalars, require, share_outputs
from praxis_lite.layers import reference_of
from praxis_lite.tasks.language_model import LanguageModelTask, require_unpacked

__all__ = ["DpoTask"]

# B pairs, T time; the chosen answer first.


class DpoTask(LanguageModelTask):
    """Trains a language model on pairs of answers (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    Reads `ids`, `labels` int32 [B, 2, T], `answers` float32 [B, 2, T], 1 for the labels of the
    answer, and `weights` float32 [B]. The reference is the model without its adapters, or the
    frozen copy that `with_reference` makes. Auxiliary losses of layers, such as the balance of
    experts, are not part of the loss. Decodes as `LanguageModelTask`.

    Both models run as in evaluation, without dropout: each with its own draws would count as a
    difference in what they learned. TRL does the same (`disable_dropout=True`).

    Args:
      model, learner: as of LanguageModelTask, as all others.
      beta: how far the model may go from the reference; the smaller, the farther.
      label_smoothing: the share of pairs that are labelled the wrong way round (Mitchell 2023,
        conservative DPO); below 0.5.
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
            self.learner.variational_noise is None, "DpoTask.learner.variational_noise",
            self.learner.variational_noise, "None: noise on the model's weights, and not on the "
            "reference's, would count as a difference between them",
        )

    def module(
        self, mdl_vars: Any, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> Any:
        """Returns the module as in evaluation, in training too."""
        return super().module(mdl_vars, None, key if eval_key is None else eval_key)

    def compute_loss(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns metrics, by TRL's names, each a mean over pairs.

        loss; rewards/chosen, rewards/rejected: beta times how much likelier an answer is than by
        the reference, in nats; rewards/margins: their difference; rewards/accuracies: the share of
        pairs in which it is positive by more than rounding, as no pair is of a model that still is
        the reference.
        """
        require_unpacked(inputs, "DpoTask compares pairs of answers, a row each, and its model")
        before = jax.lax.stop_gradient(_log_probs(reference_of(model), inputs))
        log_probs = _log_probs(model, inputs)
        rewards = self.beta * (log_probs - before)
        margins = rewards[:, 0] - rewards[:, 1]
        summed = jnp.sum(jnp.abs(log_probs) + jnp.abs(before), axis=-1)
        rounding = 16 * jnp.finfo(summed.dtype).eps * self.beta * summed
        right, wrong = jax.nn.log_sigmoid(margins), jax.nn.log_sigmoid(-margins)
        per_pair = {
            "loss": -(1 - self.label_smoothing) * right - self.label_smoothing * wrong,
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
    """Returns the log-probability of each answer, [B, 2], in nats."""
    ids, labels, answers = (
        inputs[name].reshape(-1, inputs[name].shape[-1]) for name in ("ids", "labels", "answers")
    )
    outputs = model.compute_loss(ids, labels, answers, key=None)
    return -outputs["per_sequence_xent"].reshape(-1, 2)
