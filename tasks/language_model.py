"""LanguageModelTask: next-token prediction, and decoding of prompts."""

import functools
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
    "LanguageModelTask",
    "outputs_of_logits",
    "paddings_with_filler",
    "reports_batch_summaries",
    "require_unpacked",
]

# B batch, T time, P longest prompt.
# Optional leaves of a batch, mapped to arguments of the model's `compute_loss`.
OPTIONAL_INPUTS = {
    "segment_ids": "segment_ids",
    "segment_pos": "positions",
    "paddings": "paddings",
    "inputs_indicator": "inputs_indicator",
}
# Sample rather than Greedy, so that `--set task.decoder.temperature` works.
_GREEDY = Sample(temperature=0.0)
PER_ROW_SETTINGS = ("temperature", "per_example_max_decode_steps")


class LanguageModelTask(Task):
    """Trains a model of ids [B, T] -> (logits [B, T, V], cache) on next tokens; decodes prompts.

    Training batches contain `ids` and `labels` int32 [B, T] and `weights` float32 [B, T]. If the
    model has a `compute_loss` method, these batches may also contain `segment_ids` and
    `segment_pos` int32 [B, T] for packed rows, `paddings` float32 [B, T] and `inputs_indicator` for
    prefix models. For other models, packed rows are rejected. Decoding batches contain `ids` int32
    [B, P], `prefix_lengths` int32 [B] and `weights` float32 [B], which are 0 for padding rows.

    Args:
      model: See Task.
      learner: See Task.
      weight_sharding: See Task.
      inputs_split_mapping: See Task.
      fprop_dtype: See Task.
      quantization: A name in QUANTIZATION_RECIPES. "int8", "float8" and similar recipes quantize
        the matmuls of dense layers; "nf4" and "int4" store frozen weights in 4 bits. None disables
        quantization.
      tokenizer: Tokenizer of the datasets, or its directory, for converting decoded ids to text. If
        None, tokens are bytes. The name of the metric bits_per_<token unit> contains the
        tokenizer's `token_unit`.
      decoder: Decoder that continues prompts. The default decoder is greedy, or samples if its
        temperature is set. The decoder's eos_id and the tokens of its stop strings are taken from
        the tokenizer.
      metrics: See Task. Metrics receive the outputs of the model's `compute_loss`, or the logits if
        the model has no such method.
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
            with_recipe(model, quantization, learner),
            learner,
            weight_sharding=weight_sharding,
            inputs_split_mapping=inputs_split_mapping,
            fprop_dtype=fprop_dtype,
            metrics=metrics,
        )
        self.tokenizer, self._has_tokenizer = as_tokenizer(tokenizer), tokenizer is not None
        self._decoder = decoder

    @functools.cached_property
    def decoder(self) -> Decoder:  # type: ignore[override]
        """The decoder, with the tokenizer's EOS ids and its encodings of the stop strings."""
        tokenizer = self.tokenizer
        if not self._has_tokenizer and self.num_ids().get("ids") not in (256, 257, None):
            # The ids may not be bytes, so id 3 must not end a row.
            tokenizer = ByteTokenizer()
            tokenizer.chat = None
        return for_tokenizer(self._decoder, tokenizer)

    def check_inputs(self, inputs: Mapping[str, Any], required: tuple[str, ...], what: str) -> None:
        """Also checks that ids are integers, and that the model supports the ids' positions."""
        super().check_inputs(inputs, required, what)
        dtype = inputs["ids"].dtype
        require(jnp.issubdtype(dtype, jnp.integer), f"{what}: the dtype of ids", dtype, "int32")
        model, length = self.model.abstract_module(), inputs["ids"].shape[-1]
        if required == self.required_decode_inputs:
            length = cache_length(self.decoder, length)
        is_causal = getattr(model, "model_type", "causal") == "causal"
        if hasattr(model, "init_cache") and (is_causal or required == self.required_decode_inputs):
            # Raises ConfigError if the cache has more positions than the model supports.
            jax.eval_shape(lambda: model.init_cache(1, length))
        if required == self.required_decode_inputs:
            if not hasattr(model, "init_cache"):
                raise ConfigError(
                    f"{type(model).__name__} has no init_cache, but a LanguageModelTask decodes "
                    "with a cache. Add this method (docs/how_to_add.md), or use a LossTask with "
                    "`predict`, a function that continues the prompts."
                )
            self.decoder.check_model(model)

    def _token_unit(self, model: nnx.Module) -> str:
        # Without a tokenizer, tokens are bytes unless the vocabulary is larger.
        num_ids = 0 if self._has_tokenizer else getattr(model, "vocab_size", 0)
        return "token" if num_ids > ByteTokenizer.vocab_size else self.tokenizer.token_unit

    def stored_for_decoding(self) -> dict[str, Callable[[jax.Array], Any]]:
        """Returns functions that convert weights for decoding, keyed by path; see Decoder."""
        return stored_forms(self)

    def num_ids(self) -> dict[str, int]:
        """Returns the limits for ids, labels and positions that the model declares."""
        model = self.model.abstract_module()
        sizes = {name: getattr(model, "vocab_size", None) for name in ("ids", "labels")}
        sizes["segment_pos"] = getattr(model, "num_positions", None)
        return {name: size for name, size in sizes.items() if isinstance(size, int)}

    def compute_loss(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns metrics, as means over tokens.

        "loss" is in nats and includes the layers' auxiliary losses, which are also reported as
        "aux_loss". "bits_per_<token unit>" is only the cross-entropy. The other metrics are
        "accuracy" and layer summaries, averaged over layers that report a summary with the same
        name.
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
        """Continues a batch of prompts; returns the outputs of `Decoder.__call__`.

        The index of each row is folded into `key`. The batch may override decoder settings per row:
        `temperature` float [B] and `per_example_max_decode_steps` int [B].
        """
        lengths = jnp.where(inputs["weights"] > 0, inputs["prefix_lengths"], 0)
        keys = self.row_keys(key, lengths.shape[0])
        return self.decoder(model, inputs["ids"], lengths, keys, **self.per_row_settings(inputs))

    def row_keys(self, key: jax.Array, num_rows: int) -> jax.Array:
        """Returns a key for each row of a batch, by folding the row's index into `key`."""
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(num_rows))

    def per_row_settings(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the decoder settings that a batch overrides per row."""
        return {name: inputs[name] for name in PER_ROW_SETTINGS if name in inputs}

    def decode_to_records(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Returns a record for each prompt and hypothesis, with the prompt and its continuation.

        Padding rows have no record. If prompts have several hypotheses, the best hypothesis comes
        first, and each record has a rank ("sample") and a score. With speculation, "model_steps"
        counts the model calls that produced the new tokens. With prefix sharing, "shared_length" is
        the length of the shared prefix.
        """
        records, num_hyps = [], self.decoder.num_hyps
        for row in np.flatnonzero(inputs["weights"] > 0):
            prompt = inputs["ids"][row, : inputs["prefix_lengths"][row]]
            prompt_text = self.tokenizer.decode(self.tokenizer.without_start(prompt))
            for hyp in range(num_hyps):
                new_ids = outputs["output_ids"][row, hyp, : outputs["decode_lengths"][row, hyp]]
                text = continuation_text(self.tokenizer, prompt, new_ids, self.decoder.stop_strings)
                # Cut the tokens after a stop string that the decoder did not recognize, because it
                # is tokenized differently there.
                new_ids = new_ids[: text.num_tokens]
                is_ended = text.is_stopped or bool(
                    len(new_ids) and new_ids[-1] in self.decoder.eos_ids
                )
                record = {
                    "prompt": prompt_text,
                    "continuation": text.text,
                    "prefix_length": len(prompt),
                    "decode_length": len(new_ids),
                    "ended": is_ended,
                    "log_prob": float(np.sum(outputs["logprobs"][row, hyp, : len(new_ids)])),
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


def reports_batch_summaries(model: Any) -> bool:
    """Returns whether a layer of the model reports batch summaries, such as expert load."""
    return isinstance(model, nnx.Module) and bool(intermediates(model, Summary))


def paddings_with_filler(
    weights: jax.Array, paddings: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array:
    """Returns float32 paddings [B, T] that also mark rows whose weights are all 0.

    Otherwise, padding rows would use expert capacity and affect expert load and loss.

    Args:
      weights: Weights of the tokens, [B, any].
      paddings: The batch's paddings, [B, T], or None.
      segment_ids: The batch's segments, [B, T]; required if paddings is None.
    """
    is_padding = (segment_ids == 0) if paddings is None else (paddings >= 0.5)
    return (is_padding | jnp.all(weights == 0, axis=1, keepdims=True)).astype(jnp.float32)


def _outputs_of(
    model: Any, inputs: Mapping[str, jax.Array], key: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the outputs of the model's `compute_loss`, or computes them from its logits."""
    ids, labels, weights = (inputs[name] for name in LanguageModelTask.required_inputs)
    if hasattr(model, "compute_loss"):
        optional = {
            argument: inputs[name] for name, argument in OPTIONAL_INPUTS.items() if name in inputs
        }
        takes_paddings = "paddings" in inspect.signature(model.compute_loss).parameters
        if takes_paddings and reports_batch_summaries(model):
            segment_ids = optional.get("segment_ids", jnp.ones_like(ids))
            optional["paddings"] = paddings_with_filler(
                weights, optional.get("paddings"), segment_ids
            )
        return model.compute_loss(ids, labels, weights, key=key, **optional)
    require_unpacked(inputs, f"{type(model).__name__} has no compute_loss")
    outputs = outputs_of_logits(_logits_of(model, ids, key), labels, weights)
    return {**outputs, "total_loss": outputs["avg_xent"]}


def _logits_of(model: Any, ids: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns the logits [B, T, V] of a model without a `compute_loss`."""
    name = type(model).__name__
    expected = (
        f"LanguageModelTask calls {name}(ids, key=key), and expects (logits [B, T, V], cache). "
        f"Change {name}, or use a LossTask, whose loss function calls the model."
    )
    try:
        inspect.signature(model).bind(ids, key=key)
    except TypeError as error:
        raise ConfigError(f"{name}.__call__: {error}. {expected}") from None
    outputs = model(ids, key=key)
    if not isinstance(outputs, tuple):
        found = type(outputs).__name__
        raise ConfigError(f"{name}.__call__ returns a value of type {found}. {expected}")
    return outputs[0]


def require_unpacked(inputs: Mapping[str, Any], reason: str) -> None:
    """Raises an error if a batch is packed, for models that do not support segments.

    Args:
      inputs: The batch.
      reason: Why segments are not supported, as a main clause; the error message begins with this
        clause.

    Raises:
      ConfigError: The batch has `segment_ids`.
    """
    if "segment_ids" in inputs:
        raise ConfigError(
            f"{reason}, so it cannot use the segment_ids of the batch, and documents that are "
            "packed into a row would attend to each other. Train a model whose compute_loss takes "
            "segment_ids and positions, or use unpacked batches without the leaf 'segment_ids'."
        )


def outputs_of_logits(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> dict[str, jax.Array]:
    """Returns the float32 logits, their mean cross-entropy (nats), accuracy and total weight.

    Args:
      logits: [..., V].
      labels: int [...].
      weights: [...].

    Returns:
      A dict with "logits", "avg_xent", "accuracy" and "total_weight".
    """
    logits, weights = logits.astype(jnp.float32), weights.astype(jnp.float32)
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    total_weight = jnp.sum(weights)
    divisor = jnp.maximum(total_weight, 1e-9)
    return {
        "logits": logits,
        "avg_xent": jnp.sum(xent * weights) / divisor,
        "accuracy": jnp.sum(is_correct * weights) / divisor,
        "total_weight": total_weight,
    }


def _mean_summaries(model: nnx.Module) -> dict[str, jax.Array]:
    """Returns layer summaries, averaged over layers and keyed by the last part of their paths."""
    by_name: dict[str, list[jax.Array]] = {}
    for path, value in intermediates(model, Summary).items():
        by_name.setdefault(path.rsplit("/", 1)[-1], []).append(jnp.ravel(value))
    return {name: jnp.mean(jnp.concatenate(values)) for name, values in by_name.items()}
