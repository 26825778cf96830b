"""The base class of decoders, with their common settings, checks and call signature."""

import abc
import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import require, require_choice
from praxis_lite.decode.prompt_padding import check_has_rows
from praxis_lite.decode.speculation import check_supports_drafts

__all__ = ("Decoder", "Prompts")

# B prompts, P longest prompt, S = num_hyps continuations of each, M = max_decode_steps new tokens.

# Arrays keyed by name; see `Decoder.__call__`.
Outputs = dict[str, jax.Array]


class Prompts(NamedTuple):
    """The arguments of `Decoder.__call__` for a batch of prompts."""

    ids: jax.Array
    lengths: jax.Array
    keys: jax.Array
    temperature: jax.Array | None = None
    per_example_max_decode_steps: jax.Array | None = None
    top_k: jax.Array | None = None  # top_k and top_p are only used by `SampleByRow`.
    top_p: jax.Array | None = None
    wants_likeliest: jax.Array | None = None


class TokenizerIds(tuple[int, ...]):
    """Token ids from a tokenizer; some may be outside the model's vocabulary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder(abc.ABC):
    """Continues prompts with a model; settings are named as in Pax's DecoderHParams.

    Attributes:
      max_decode_steps: Maximum number of new tokens per prompt, including the end-of-text token.
      seqlen: Maximum number of tokens in a row, including the prompt. If None, rows are limited
        only by max_decode_steps. (Pax's default of 0 means "must be set".)
      min_decode_steps: Minimum number of new tokens before an end-of-text token. In Pax, only beam
        search supports this setting.
      eos_id: One or more tokens that end a row. If None, the tokenizer's `eos_ids` are used. If (),
        no token ends a row. (Pax's default is 2.)
      weights_dtype: Storage format of the weights while decoding. If None, the weights are stored
        unchanged. "activations" stores each weight that the model casts to a narrower dtype in that
        dtype, with the same results. "int8" also rounds the weights of dense layers, with a scale
        per output channel, and logs the names of the rounded weights. On TPU, a step then reads one
        byte per weight. On CPU and GPU, XLA materializes the cast, so int8 saves memory but slows
        down a step (on an H200, by a factor of 1.7 for a single row).
      weights_outputs_first: Whether to store the weights of dense layers as [out, in]. On CPU, this
        makes decoding a third faster for batches of several rows. Sums are computed in a different
        order, so the last bits of float32 results differ.
      fprop_for_prefix: Whether the model reads the prompt in a single forward pass. If False, the
        prompt is read one token at a time, as in Pax by default. The continuation is the same.
      prefill_chunk_size: Maximum number of prompt tokens per forward pass, to limit the memory for
        long prompts. If None, all tokens are read in a single pass. The continuation is the same.
    """

    max_decode_steps: int = 128
    seqlen: int | None = None
    min_decode_steps: int = 0
    eos_id: int | tuple[int, ...] | None = None
    weights_dtype: str | None = None
    weights_outputs_first: bool = False
    fprop_for_prefix: bool = True
    prefill_chunk_size: int | None = None
    # Defaults for decoders without these settings. An annotation would make them dataclass fields.
    temperature = 0.0
    stop_strings = tuple[str, ...]()
    num_speculative_tokens = num_cached_prefixes = 0
    top_k = cast("int | None", None)
    top_p = cast("float | None", None)

    def __post_init__(self):
        # JSON and the command line pass lists, but a decoder is a static argument of jit and must
        # be hashable.
        if isinstance(self.eos_id, list):
            object.__setattr__(self, "eos_id", tuple(self.eos_id))
        self._check_types()
        max_int32 = 2**31 - 1  # Steps are counted in int32.
        self._require("max_decode_steps", 1 <= self.max_decode_steps <= max_int32, "1 or more")
        self._require("seqlen", self.seqlen is None or self.seqlen >= 1, "None, or 1 or more")
        size = self.prefill_chunk_size
        self._require(
            "prefill_chunk_size",
            size is None or (size >= 1 and self.fprop_for_prefix),
            "None, or 1 or more; it must be None with fprop_for_prefix=False",
        )
        self._require(
            "min_decode_steps",
            0 <= self.min_decode_steps < self.max_decode_steps,
            f"0 or more and less than max_decode_steps ({self.max_decode_steps})",
        )
        if self.weights_dtype is not None:
            setting = f"{type(self).__name__}.weights_dtype"
            require_choice(setting, self.weights_dtype, ("activations", "int8"))
        self._require(
            "eos_id",
            self.eos_id is None or all(map(is_token, self.eos_ids)),
            "a token id, a tuple of token ids, or None to use the tokenizer's",
        )

    @property
    def weights_form(self) -> dict[str, Any]:
        """The settings that determine the storage format of weights while decoding."""
        names = ("weights_dtype", "weights_outputs_first")
        return {name: getattr(self, name) for name in names}

    def check_vocabulary(self, size: int, of_tokenizer: Collection[int] = ()) -> None:
        """Checks that the token ids in the settings are in the model's vocabulary.

        Every decoding loop calls this method. Ids from a tokenizer may be outside the vocabulary.

        Args:
          size: Vocabulary size of the model.
          of_tokenizer: Ids that come from a tokenizer but were not set by `for_tokenizer`.

        Raises:
          ConfigError: An id that the user set is not in the vocabulary.
        """
        if not isinstance(self.eos_id, TokenizerIds):
            self._check_tokens("eos_id", tuple(set(self.eos_ids) - set(of_tokenizer)), size)

    def _check_tokens(self, name: str, ids: tuple[int, ...], size: int) -> None:
        expected = f"tokens from 0 to {size - 1}, because the model's vocab_size is {size}"
        self._require(name, all(i < size for i in ids), expected)

    def check_model(self, model: Any) -> None:
        """Raises ConfigError if the model's cache does not support these settings."""
        check_has_rows(model)
        if self.num_speculative_tokens:
            setting = f"{type(self).__name__}.num_speculative_tokens"
            check_supports_drafts(model, setting, self.num_speculative_tokens)

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            actual = getattr(self, field.name)
            for kind, (types, expected) in _TYPES.items():
                if field.type in (kind, kind | None) and (actual is not None or field.type is kind):
                    is_valid = isinstance(actual, types)
                    is_valid &= kind is bool or not isinstance(actual, bool)
                    or_none = "" if field.type is kind else ", or None"
                    self._require(field.name, is_valid, f"{expected}{or_none}")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a row; () if neither the decoder nor a tokenizer sets any."""
        if self.eos_id is None:
            return ()
        return self.eos_id if isinstance(self.eos_id, tuple) else (self.eos_id,)

    def is_eos(self, ids: jax.Array) -> jax.Array:
        """Returns whether each of `ids` ends a row."""
        return jnp.isin(ids, jnp.asarray(self.eos_ids, jnp.int32))

    @property
    @abc.abstractmethod
    def num_hyps(self) -> int:
        """The number of continuations (samples or beams) per prompt."""

    def __call__(
        self,
        model: Any,
        ids: jax.Array,
        prefix_lengths: jax.Array,
        keys: jax.Array,
        *,
        temperature: jax.Array | None = None,
        per_example_max_decode_steps: jax.Array | None = None,
    ) -> Outputs:
        """Continues a batch of prompts.

        Args:
          model: Model with the methods `init_cache(batch_size, length)` and
            `__call__(ids, positions=, paddings=, cache=) -> (logits, cache)`. Layers of an
            nnx.Module declare with `cache_skips_padding` that their caches do not store padding;
            see `BaseLayer`. The caches of any other model must not store padding.
          ids: int32 [B, P], padded on the right with arbitrary ids.
          prefix_lengths: int32 [B], the length of each prompt without padding. Rows of length 0
            have no prompt and are skipped.
          keys: Random keys [B], one per prompt.
          temperature: Float [B], which overrides the temperature of decoders that have one.
          per_example_max_decode_steps: int [B], a limit on new tokens for each prompt, in addition
            to max_decode_steps.

        Returns:
          A dict of arrays; `pax_outputs` converts it to Pax's format.
          * output_ids: int32 [B, S, M], the new tokens, and 0 after the end.
          * decode_lengths: int32 [B, S], the number of new tokens, including the end-of-text token.
          * logprobs: float32 [B, S, M], log-probs of the new tokens under the model before any
            filtering, and 0 after the end.
          * scores: float32 [B, S], the scores by which the hypotheses for a prompt are sorted.
          * prefix_logprobs: float32 [B, P], log-probs of the prompt's tokens, and 0 for the first.
            Only returned if fprop_for_prefix is False.
        """
        prompts = Prompts(ids, prefix_lengths, keys, temperature, per_example_max_decode_steps)
        return self.decode(model, prompts)

    @abc.abstractmethod
    def decode(self, model: Any, prompts: Prompts) -> Outputs:
        """Implements `__call__`, and may return additional arrays."""

    def _require(self, name: str, is_valid: bool, expected: str) -> None:
        require(is_valid, f"{type(self).__name__}.{name}", getattr(self, name), expected)


_TYPES = {
    bool: (bool, "True or False"),
    int: (int | np.integer, "an integer"),
    float: (int | float | np.integer | np.floating, "a number"),
}


def is_token(i: object) -> bool:
    """Returns whether a value is a valid token id."""
    if isinstance(i, bool) or not isinstance(i, int | np.integer):
        return False
    return 0 <= int(i) < 2**31
