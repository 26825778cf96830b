"""SequenceToSequenceTask: trains encoder-decoder models, for example for translation."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from praxis_lite.core import (
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
from praxis_lite.inputs.tokenizers import Tokenizer, as_tokenizer
from praxis_lite.layers import aux_loss
from praxis_lite.tasks.language_model import (
    paddings_with_filler,
    reports_batch_summaries,
)

__all__ = ["SequenceToSequenceTask"]

# B batch, S source length, T target length, P longest target prompt.

# Optional leaves of a batch, mapped to arguments of the model's `compute_loss`.
OPTIONAL_INPUTS = {
    "src_segment_ids": "input_segment_ids",
    "src_segment_pos": "input_segment_pos",
    "paddings": "target_paddings",
    "segment_ids": "target_segment_ids",
    "segment_pos": "target_segment_pos",
}
# Sample rather than Greedy, so that `--set task.decoder.temperature` works.
_GREEDY = Sample(temperature=0.0)


class SequenceToSequenceTask(Task):
    """Trains a TransformerEncoderDecoder on the next tokens of targets, and decodes targets.

    Training batches contain sources, `src_ids` int32 [B, S] and `src_paddings` float32 [B, S] (1.0
    for padding), and targets, `ids` and `labels` int32 [B, T] and `weights` float32 [B, T]. They
    may also contain `paddings` and, for packed rows, `segment_ids`, `segment_pos`,
    `src_segment_ids` and `src_segment_pos`. Decoding batches contain sources, prompts for the
    targets, `ids` int32 [B, P] and `prefix_lengths` int32 [B], and `weights` float32 [B], which are
    0 for padding rows. They may also contain targets, `labels` int32 [B, T], with 0 after the end.

    Args:
      model: See Task.
      learner: See Task.
      weight_sharding: See Task.
      inputs_split_mapping: See Task.
      fprop_dtype: See Task.
      tokenizer: Tokenizer, or its directory, for converting decoded ids to text. If None, records
        contain only ids.
      decoder: Decoder for the targets; greedy by default.
      metrics: See Task. Metrics receive the outputs of the model's `compute_loss`.

    Raises:
      ConfigError: The decoder sets `num_cache_slots` or `num_cached_prefixes`, which are not
        supported, because each row has a different source.
    """

    weight_unit = "tokens"
    required_inputs = ("src_ids", "src_paddings", "ids", "labels", "weights")
    required_decode_inputs = ("src_ids", "src_paddings", "ids", "prefix_lengths", "weights")

    def __init__(
        self,
        model: Callable[..., nnx.Module],
        learner: Learner,
        *,
        weight_sharding: WeightSharding | None = None,
        inputs_split_mapping: Mapping[str, Any] | None = None,
        fprop_dtype: jnp.dtype | None = None,
        tokenizer: Tokenizer | str | None = None,
        decoder: Decoder = _GREEDY,
        metrics: Mapping[str, Metric] | None = None,
    ):
        super().__init__(
            model,
            learner,
            weight_sharding=weight_sharding,
            inputs_split_mapping=inputs_split_mapping,
            fprop_dtype=fprop_dtype,
            metrics=metrics,
        )
        self.tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
        for name in ("num_cache_slots", "num_cached_prefixes"):
            actual = getattr(decoder, name, 0)
            require(
                not actual,
                f"SequenceToSequenceTask.decoder.{name}",
                actual,
                "0",
                "Rows of a batch cannot share a cache, because their sources differ.",
            )
        require(
            not decoder.stop_strings or self.tokenizer is not None,
            "SequenceToSequenceTask.decoder.stop_strings",
            decoder.stop_strings,
            "(), because the task has no tokenizer",
            "Set tokenizer, or pass the token ids as stop_sequences.",
        )
        self.decoder = decoder
        if self.tokenizer is not None:
            self.decoder = for_tokenizer(decoder, self.tokenizer)

    def check_inputs(self, inputs: Mapping[str, Any], required: tuple[str, ...], what: str) -> None:
        """Also checks that the model supports the positions needed for decoding."""
        super().check_inputs(inputs, required, what)
        if required == self.required_decode_inputs:
            model, length = self.model.abstract_module(), inputs["ids"].shape[1]
            length, encoded_length = cache_length(self.decoder, length), inputs["src_ids"].shape[1]
            jax.eval_shape(lambda: model.init_cache(1, length, encoded_length=encoded_length))

    def stored_for_decoding(self) -> dict[str, Callable[[jax.Array], Any]]:
        """Returns functions that convert weights for decoding, keyed by path; see Decoder."""
        return stored_forms(self)

    def num_ids(self) -> dict[str, int]:
        """Returns the model's `vocab_size` as the limit for ids and labels, or {}."""
        vocab_size = getattr(self.model.abstract_module(), "vocab_size", None)
        if not isinstance(vocab_size, int):
            return {}
        return dict.fromkeys(("src_ids", "ids", "labels"), vocab_size)

    def compute_loss(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> WeightedScalars:
        """Returns the metrics "loss", "accuracy" and "exact_match", and optionally "aux_loss".

        The loss is in nats per token and includes the layers' auxiliary losses. "exact_match" is
        the fraction of rows in which every token is predicted correctly from the preceding target
        tokens.
        """
        optional = {name: inputs[key] for key, name in OPTIONAL_INPUTS.items() if key in inputs}
        labels, weights = inputs["labels"], inputs["weights"].astype(jnp.float32)
        optional["input_paddings"] = inputs["src_paddings"]
        if reports_batch_summaries(model):
            segment_ids = inputs.get("segment_ids", jnp.ones_like(labels))
            for name, segments in (("input_paddings", None), ("target_paddings", segment_ids)):
                optional[name] = paddings_with_filler(weights, optional.get(name), segments)
        outputs = model.compute_loss(
            inputs["src_ids"], inputs["ids"], labels, weights, key=key, **optional
        )
        share_outputs(outputs)
        num_tokens = outputs["total_weight"]
        is_wrong = (outputs["per_example_argmax"] != labels) & (weights > 0)
        is_real_row = jnp.any(weights > 0, axis=1)
        num_rows = jnp.sum(is_real_row.astype(jnp.float32))
        num_matches = jnp.sum((is_real_row & ~jnp.any(is_wrong, axis=1)).astype(jnp.float32))
        metrics = {
            "loss": (outputs["total_loss"], num_tokens),
            "accuracy": (outputs["accuracy"], num_tokens),
            "exact_match": (num_matches / jnp.maximum(num_rows, 1.0), num_rows),
        }
        if aux_loss(model) is not None:
            metrics["aux_loss"] = (outputs["aux_loss"], num_tokens)
        return metrics

    def decode(
        self, model: nnx.Module, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> dict[str, jax.Array]:
        """Decodes targets; returns the outputs of `Decoder.__call__`.

        The index of each row is folded into `key`.
        """
        lengths = jnp.where(inputs["weights"] > 0, inputs["prefix_lengths"], 0)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(lengths.shape[0]))
        conditioned = model.given(inputs["src_ids"], input_paddings=inputs["src_paddings"])
        return self.decoder(conditioned, inputs["ids"], lengths, keys)

    def decode_to_records(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Returns a record for each row and hypothesis, with the best hypothesis first.

        Padding rows have no record. Records contain source_ids, output_ids (including the end
        token) and log_prob. With a tokenizer, they also contain source and output as text; the
        output does not include special tokens and the stop string. With labels, they also contain
        target_ids and is_match. With several hypotheses, they also contain the rank ("sample") and
        the score.
        """
        records = []
        for row in np.flatnonzero(inputs["weights"] > 0):
            source = inputs["src_ids"][row][inputs["src_paddings"][row] < 0.5]
            for hyp in range(self.decoder.num_hyps):
                new_ids = outputs["output_ids"][row, hyp, : outputs["decode_lengths"][row, hyp]]
                texts: dict[str, str] = {}
                if self.tokenizer is not None:
                    prompt = inputs["ids"][row, : inputs["prefix_lengths"][row]]
                    output = continuation_text(
                        self.tokenizer, prompt, new_ids, self.decoder.stop_strings
                    )
                    # Cut the tokens after a stop string that the decoder did not recognize.
                    new_ids = new_ids[: output.num_tokens]
                    texts = {"source": self.tokenizer.decode(source), "output": output.text}
                record = {"source_ids": source.tolist(), "output_ids": new_ids.tolist(), **texts}
                record["log_prob"] = float(np.sum(outputs["logprobs"][row, hyp, : len(new_ids)]))
                if "labels" in inputs:
                    target = np.trim_zeros(inputs["labels"][row], "b").tolist()
                    record |= {"target_ids": target, "is_match": target == record["output_ids"]}
                if self.decoder.num_hyps > 1:
                    record |= {"sample": hyp, "score": float(outputs["scores"][row, hyp])}
                records.append(record)
        return records
