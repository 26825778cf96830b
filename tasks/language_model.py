"""Next-token prediction and continuation of prompts."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite.decode import Sampling, decode_tokens
from praxis_lite.errors import ConfigError
from praxis_lite.inputs.text import ByteTokenizer
from praxis_lite.learner import Learner
from praxis_lite.task import Task, WeightedScalars

# B batch, T time, P longest prompt.


class LanguageModelTask(Task):
    """Trains a model of (ids [B, T]) -> (logits [B, T, V], cache) on next tokens; decodes from it.

    Reads `ids`, `labels` int32 [B, T] and `weights` float32 [B, T]; to decode, `ids` int32 [B, P],
    `prefix_lengths` int32 [B] and `weights` float32 [B] (0 for a filler row).

    Args:
      model, learner, inputs_split_mapping: see Task.
      tokenizer: for the text of what is decoded; its `token_unit` names the metric bits_per_...
      sampling: how tokens are chosen.
      max_decode_steps: most new tokens per prompt.
    """

    weight_unit = "tokens"
    required_inputs = ("ids", "labels", "weights")
    required_decode_inputs = ("ids", "prefix_lengths", "weights")

    def __init__(
        self,
        model: Callable[..., nnx.Module],
        learner: Learner,
        *,
        inputs_split_mapping: Mapping[str, Any] | None = None,
        tokenizer: ByteTokenizer | None = None,
        sampling: Sampling | None = None,
        max_decode_steps: int = 128,
    ):
        super().__init__(model, learner, inputs_split_mapping=inputs_split_mapping)
        if max_decode_steps < 1:
            raise ConfigError(
                f"LanguageModelTask.max_decode_steps is {max_decode_steps}; wanted is 1 or more."
            )
        self.tokenizer = tokenizer or ByteTokenizer()
        self.sampling = sampling or Sampling()
        self.max_decode_steps = max_decode_steps

    def check_inputs(self, inputs: Mapping[str, Any], required: tuple[str, ...], what: str) -> None:
        """Also checks that the model has a position for each token of a batch and its decoding."""
        super().check_inputs(inputs, required, what)
        model, length = self.model.abstract_module(), inputs["ids"].shape[1]
        if required == self.required_decode_inputs:
            length += self.max_decode_steps
        if hasattr(model, "init_cache"):
            jax.eval_shape(lambda: model.init_cache(1, length))

    def compute_loss(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns loss (nats per token), bits_per_<token unit>, accuracy; weighted by tokens."""
        logits, _ = model(inputs["ids"], key=key)
        labels, weights = inputs["labels"], inputs["weights"].astype(jnp.float32)
        xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
        num_tokens = jnp.sum(weights)
        divisor = jnp.maximum(num_tokens, 1e-9)
        loss = jnp.sum(xent * weights) / divisor
        return {
            "loss": (loss, num_tokens),
            f"bits_per_{self.tokenizer.token_unit}": (loss / math.log(2.0), num_tokens),
            "accuracy": (jnp.sum(correct * weights) / divisor, num_tokens),
        }

    def decode(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns the fields of `decode.decode_tokens`."""
        is_true_row = inputs["weights"] > 0
        return decode_tokens(
            model,
            inputs["ids"],
            jnp.where(is_true_row, inputs["prefix_lengths"], 0),
            key,
            sampling=self.sampling,
            max_decode_steps=self.max_decode_steps,
            eos_id=self.tokenizer.eos_id,
        )

    def decode_to_records(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Returns prompt, continuation, its tokens, length and log-probability per true row."""
        records = []
        for row in np.flatnonzero(inputs["weights"] > 0):
            prompt = inputs["ids"][row, : inputs["prefix_lengths"][row]]
            text = prompt[prompt != self.tokenizer.eos_id]  # It also marks the beginning.
            new_ids = outputs["output_ids"][row, : outputs["decode_lengths"][row]]
            records.append(
                {
                    "prompt": self.tokenizer.decode(text),
                    "continuation": self.tokenizer.decode(new_ids),
                    "prefix_length": len(prompt),
                    "decode_length": len(new_ids),
                    "ended": bool(len(new_ids) and new_ids[-1] == self.tokenizer.eos_id),
                    "log_prob": float(outputs["log_probs"][row]),
                    "output_ids": new_ids.tolist(),
                }
            )
        return records
