"""Next-token prediction and continuation of prompts."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite.core import (
    ConfigError,
    Learner,
    Metric,
    Task,
    WeightedScalars,
    WeightSharding,
    require,
    share_outputs,
)
from praxis_lite.decode import (
    Decoder,
    Sample,
    cache_length,
    continuation_text,
    for_tokenizer,
    stored_forms,
)
from praxis_lite.inputs.tokenizers import ByteTokenizer, Tokenizer, as_tokenizer
from praxis_lite.layers import Summary, aux_loss, intermediates, with_recipe

__all__ = [
    "LanguageModelTask", "outputs_of_logits", "paddings_with_filler", "reports_of_batches",
    "require_unpacked",
]

# B batch, T time, P longest prompt.
# Optional leaves of a batch, and the arguments of models that they are.
OPTIONAL_INPUTS = {
    "segment_ids": "segment_ids",
    "segment_pos": "positions",
    "paddings": "paddings",
    "inputs_indicator": "inputs_indicator",
}
# A decoder whose temperature can be set.
_GREEDY = Sample(temperature=0.0)
PER_ROW_SETTINGS = ("temperature", "per_example_max_decode_steps")


class LanguageModelTask(Task):
    """Trains a model of (ids [B, T]) -> (logits [B, T, V], cache) on next tokens; decodes from it.

    Reads `ids`, `labels` int32 [B, T] and `weights` float32 [B, T], and, for models with a
    `compute_loss`, optional `segment_ids`, `segment_pos` int32 [B, T] (packed rows, which other
    models refuse), `paddings` float32 [B, T] and `inputs_indicator` (prefix models). To decode:
    `ids` int32 [B, P], `prefix_lengths` int32 [B] and `weights` float32 [B] (0 for a padding row).

    Args:
      model, learner, weight_sharding, inputs_split_mapping, fprop_dtype, metrics: see Task. Metrics
        are given what the model's `compute_loss` returns, or logits if it has none.
      quantization: a name in QUANTIZATION_RECIPES: "int8", "float8" and similar ones round products
        of dense layers, "nf4" and "int4" store frozen weights in 4 bits; None: neither.
      tokenizer: for the text of what is decoded, or the directory of one; None: bytes. Its
        `token_unit` names the metric bits_per_..., and it is the one of the datasets.
      decoder: how prompts are continued; by default with the likeliest tokens, or with draws once
        its temperature is set. Its eos_id and stop strings become tokens of this tokenizer.
    """

    weight_unit = "tokens"
    required_inputs = ("ids", "labels", "weights")
    required_decode_inputs = ("ids", "prefix_lengths", "weights")

    def __init__(
        self,
        model: Callable[..., nnx.Module],
        learner: Learner,
        *,
        weight_sharding: WeightSharding | None = None,
        inputs_split_mapping: Mapping[str, Any] | None = None,
        fprop_dtype: jnp.dtype | None = None,
        quantization: str | None = None,
        tokenizer: Tokenizer | str | None = None,
        decoder: Decoder = _GREEDY,
        metrics: Mapping[str, Metric] | None = None,
    ):
        super().__init__(
            with_recipe(model, quantization, learner), learner, weight_sharding=weight_sharding,
            inputs_split_mapping=inputs_split_mapping, fprop_dtype=fprop_dtype, metrics=metrics,
        )
        self.tokenizer, self._is_named = as_tokenizer(tokenizer), tokenizer is not None
        self.decoder = for_tokenizer(decoder, self.tokenizer)

    def check_inputs(self, inputs: Mapping[str, Any], required: tuple[str, ...], what: str) -> None:
        """Also checks that the model has a position for each token of a batch and its decoding."""
        super().check_inputs(inputs, required, what)
        dtype = inputs["ids"].dtype
        require(jnp.issubdtype(dtype, jnp.integer), f"{what}: the dtype of ids", dtype, "int32")
        model, length = self.model.abstract_module(), inputs["ids"].shape[-1]
        if required == self.required_decode_inputs:
            length = cache_length(self.decoder, length)
        is_causal = getattr(model, "model_type", "causal") == "causal"
        if hasattr(model, "init_cache") and (is_causal or required == self.required_decode_inputs):
            jax.eval_shape(lambda: model.init_cache(1, length))
        if required == self.required_decode_inputs:
            self.decoder.check_model(model)

    def _token_unit(self, model: nnx.Module) -> str:
        # Bytes are the default tokenizer; a larger vocabulary has other, unknown tokens.
        num_ids = 0 if self._is_named else getattr(model, "vocab_size", 0)
        return "token" if num_ids > ByteTokenizer.vocab_size else self.tokenizer.token_unit

    def stored_for_decoding(self) -> dict[str, Callable[[jax.Array], Any]]:
        """Returns functions by path that make weights smaller, see `Decoder.weights_dtype`."""
        return stored_forms(self)

    def num_ids(self) -> dict[str, int]:
        """Returns the model's `vocab_size`, for ids and labels, and its number of positions."""
        model = self.model.abstract_module()
        sizes = {name: getattr(model, "vocab_size", None) for name in ("ids", "labels")}
        sizes["segment_pos"] = getattr(model, "num_positions", None)
        return {name: size for name, size in sizes.items() if isinstance(size, int)}

    def compute_loss(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns metrics, weighted by tokens.

        loss: nats per token, with the layers' aux_loss, which is then a metric too;
        bits_per_<token unit>: of the cross-entropy alone; accuracy; the layers' summaries, each
        the mean over the layers that report that name.
        """
        outputs = _outputs_of(model, inputs, key)
        share_outputs(outputs)
        num_tokens = outputs["total_weight"]
        metrics = {
            "loss": outputs["total_loss"],
            f"bits_per_{self._token_unit(model)}": outputs["avg_xent"] / math.log(2.0),
            "accuracy": outputs["accuracy"],
        }
        if isinstance(model, nnx.Module):
            if aux_loss(model) is not None:
                metrics["aux_loss"] = outputs["aux_loss"]
            metrics |= _mean_summaries(model)
        return {name: (value, num_tokens) for name, value in metrics.items()}

    def decode(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns what `Decoder.__call__` does; `key` is folded with the row.

        A batch's `temperature` float [B] and `per_example_max_decode_steps` int [B] override the
        decoder's own.
        """
        lengths = jnp.where(inputs["weights"] > 0, inputs["prefix_lengths"], 0)
        keys = self.row_keys(key, lengths.shape[0])
        return self.decoder(model, inputs["ids"], lengths, keys, **self.per_row_settings(inputs))

    def row_keys(self, key: jax.Array, num_rows: int) -> jax.Array:
        """Returns the key of each row of a batch, given the batch's."""
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(num_rows))

    def per_row_settings(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that a batch of prompts has for each row."""
        return {name: inputs[name] for name in PER_ROW_SETTINGS if name in inputs}

    def decode_to_records(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Returns a record per real row and hypothesis: prompt, continuation and its statistics.

        Of several hypotheses of a prompt the best comes first; each has its place, "sample", and
        its score. With speculation a record has "model_steps", the calls of the model that gave its
        new tokens; with shared beginnings "shared_length", how many tokens of the prompt they have.
        """
        records, num_hyps = [], self.decoder.num_hyps
        for row in np.flatnonzero(inputs["weights"] > 0):
            prompt = inputs["ids"][row, : inputs["prefix_lengths"][row]]
            prompt_text = self.tokenizer.decode(self.tokenizer.without_start(prompt))
            for hyp in range(num_hyps):
                new_ids = outputs["output_ids"][row, hyp, : outputs["decode_lengths"][row, hyp]]
                text = continuation_text(self.tokenizer, prompt, new_ids, self.decoder.stop_strings)
                is_ended = text.is_stopped or bool(
                    len(new_ids) and new_ids[-1] in self.decoder.eos_ids
                )
                record = {
                    "prompt": prompt_text,
                    "continuation": text.text,
                    "prefix_length": len(prompt),
                    "decode_length": len(new_ids),
                    "ended": is_ended,
                    "log_prob": float(np.sum(outputs["logprobs"][row, hyp])),
                    "output_ids": new_ids.tolist(),
                }
                if "num_model_steps" in outputs:
                    record["model_steps"] = int(outputs["num_model_steps"][row, hyp])
                if "num_shared" in outputs:
                    record["shared_length"] = int(outputs["num_shared"][row, hyp])
                if num_hyps > 1:
                    record |= {"sample": hyp, "score": float(outputs["scores"][row, hyp])}
                records.append(record)
        return records


def reports_of_batches(model: Any) -> bool:
    """Returns True if layers of a model summarize a batch, as experts do with their load."""
    return isinstance(model, nnx.Module) and bool(intermediates(model, Summary))


def paddings_with_filler(
    weights: jax.Array, paddings: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array:
    """Returns float32 paddings [B, T] in which rows without any weight are padding.

    For experts: padding rows must not count in their load and loss, nor use their capacity.

    Args:
      weights: [B, any], of the tokens of a row; all 0 in a padding row.
      paddings, segment_ids: [B, T], of the batch; at least one of them.
    """
    is_padding = (segment_ids == 0) if paddings is None else (paddings >= 0.5)
    return (is_padding | jnp.all(weights == 0, axis=1, keepdims=True)).astype(jnp.float32)


def _outputs_of(
    model: Any, inputs: Mapping[str, jax.Array], key: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns what the model's `compute_loss` does, or the same of its logits if it has none."""
    ids, labels, weights = (inputs[name] for name in LanguageModelTask.required_inputs)
    if hasattr(model, "compute_loss"):
        given = {
            setting: inputs[name] for name, setting in OPTIONAL_INPUTS.items() if name in inputs
        }
        takes_paddings = "paddings" in inspect.signature(model.compute_loss).parameters
        if takes_paddings and reports_of_batches(model):
            segment_ids = given.get("segment_ids", jnp.ones_like(ids))
            given["paddings"] = paddings_with_filler(weights, given.get("paddings"), segment_ids)
        return model.compute_loss(ids, labels, weights, key=key, **given)
    require_unpacked(inputs, f"{type(model).__name__} has no compute_loss, and")
    outputs = outputs_of_logits(model(ids, key=key)[0], labels, weights)
    return {**outputs, "total_loss": outputs["avg_xent"]}


def require_unpacked(inputs: Mapping[str, Any], why: str) -> None:
    """Checks that a batch is not packed, for a model that does not read segments.

    Args:
      why: The beginning of the message: which model does not take segments.

    Raises:
      ConfigError: It has `segment_ids`.
    """
    if "segment_ids" in inputs:
        raise ConfigError(
            f"{why} is given no segment_ids: documents that share a row would see each other. "
            "Train a model whose compute_loss takes segment_ids and positions, or batches without "
            "the leaf 'segment_ids', a document in each row."
        )


def outputs_of_logits(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> dict[str, jax.Array]:
    """Returns logits [..., V] in float32, their avg_xent (nats), accuracy and total_weight."""
    logits, weights = logits.astype(jnp.float32), weights.astype(jnp.float32)
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_hit = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    total_weight = jnp.sum(weights)
    divisor = jnp.maximum(total_weight, 1e-9)
    return {
        "logits": logits,
        "avg_xent": jnp.sum(xent * weights) / divisor,
        "accuracy": jnp.sum(is_hit * weights) / divisor,
        "total_weight": total_weight,
    }


def _mean_summaries(model: nnx.Module) -> dict[str, jax.Array]:
    """Returns the means of the layers' summaries, by the last part of their path."""
    by_name: dict[str, list[jax.Array]] = {}
    for path, value in intermediates(model, Summary).items():
        by_name.setdefault(path.rsplit("/", 1)[-1], []).append(jnp.ravel(value))
    return {name: jnp.mean(jnp.concatenate(values)) for name, values in by_name.items()}
