"""The base class of decoders: limits, ends of text, and the call."""

import abc
import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import require, require_choice
from praxis_lite.decode.prompt_padding import check_has_rows
from praxis_lite.decode.speculation import check_takes_back

__all__ = ("Decoder", "Prompts")

# B prompts, P longest prompt, S = num_hyps continuations of each, M = max_decode_steps new tokens.

# Arrays by name; see `Decoder.__call__`.
Outputs = dict[str, jax.Array]


class Prompts(NamedTuple):
    """A batch of prompts, as `Decoder.__call__` takes them."""

    ids: jax.Array
    lengths: jax.Array
    keys: jax.Array
    temperature: jax.Array | None = None
    per_example_max_decode_steps: jax.Array | None = None
    top_k: jax.Array | None = None  # As of `SampleByRow`.
    top_p: jax.Array | None = None
    wants_likeliest: jax.Array | None = None


class TokenizerIds(tuple[int, ...]):
    """Token ids that come from a tokenizer; the model may have no row for some of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder(abc.ABC):
    """Continues prompts with a model. Names of settings are those of Pax's DecoderHParams.

    Attributes:
      max_decode_steps: most new tokens per prompt, the end of text included.
      seqlen: most tokens of a row, its prompt included; None: only max_decode_steps limits it.
        (Pax's default of 0 means "must be set".)
      min_decode_steps: new tokens that must precede an end of text. In Pax only beam search
        heeds it.
      eos_id: token, or tokens, of which each ends a row; None: the tokenizer's; (): none. (Pax: 2.)
      weights_dtype: of the weights while decoding. None: as they are. "activations": those that the
        model casts to a narrower dtype are stored in it, which changes no number. "int8": the
        weights of dense layers are rounded too, with a scale per output channel; the log names
        them. On TPU a step then reads a byte of each. On CPU and GPU, where XLA writes the cast
        out, it saves memory, and a step takes longer (on an H200 1.7 times, of a row).
      weights_outputs_first: weights of dense layers are stored with their outputs first, and come
        first in their products. On CPU that is a third faster from some rows on; sums are taken in
        another order, so that the last bits of a float32 differ.
      fprop_for_prefix: the prompt goes through the model in one forward pass; else a token at a
        time, as Pax does by default. The continuation is the same.
      prefill_chunk_size: most tokens of a prompt in a pass, so that a long prompt takes the memory
        of a chunk, pass after pass; None: all. The continuation is the same.
    """

    max_decode_steps: int = 128
    seqlen: int | None = None
    min_decode_steps: int = 0
    eos_id: int | tuple[int, ...] | None = None
    weights_dtype: str | None = None
    weights_outputs_first: bool = False
    fprop_for_prefix: bool = True
    prefill_chunk_size: int | None = None
    # Settings of some decoders, as the others are.
    temperature = 0.0
    stop_strings = ()
    num_speculative_tokens = num_cached_prefixes = 0
    top_k = top_p = None

    def __post_init__(self):
        # Lists come from JSON and the command line; a decoder is a static, hashable value.
        if isinstance(self.eos_id, list):
            object.__setattr__(self, "eos_id", tuple(self.eos_id))
        self._check_types()
        most = 2**31 - 1  # Steps are counted in int32.
        self._require("max_decode_steps", 1 <= self.max_decode_steps <= most, "1 or more")
        self._require("seqlen", self.seqlen is None or self.seqlen >= 1, "None, or 1 or more")
        size = self.prefill_chunk_size
        self._require(
            "prefill_chunk_size", size is None or (size >= 1 and self.fprop_for_prefix),
            "None, or 1 or more; None with fprop_for_prefix=False, which reads a token at a time",
        )
        self._require(
            "min_decode_steps", 0 <= self.min_decode_steps < self.max_decode_steps,
            f"0 or more and less than max_decode_steps ({self.max_decode_steps})",
        )
        if self.weights_dtype is not None:
            setting = f"{type(self).__name__}.weights_dtype"
            require_choice(setting, self.weights_dtype, ("activations", "int8"))
        self._require(
            "eos_id", self.eos_id is None or all(map(is_token, self.eos_ids)),
            "a token, a tuple of tokens, or None for the tokenizer's",
        )

    @property
    def weights_form(self) -> dict[str, Any]:
        """The settings that decide the form of a weight while decoding."""
        names = ("weights_dtype", "weights_outputs_first")
        return {name: getattr(self, name) for name in names}

    def check_vocabulary(self, size: int, of_tokenizer: Collection[int] = ()) -> None:
        """Checks that the model has the token ids of the settings; every decoding loop calls it.

        Args:
          size: number of ids of the model.
          of_tokenizer: further ids of a tokenizer, in addition to those of `for_tokenizer`.

        Raises:
          ConfigError: it lacks one that is not a tokenizer's.
        """
        if not isinstance(self.eos_id, TokenizerIds):
            self._check_tokens("eos_id", tuple(set(self.eos_ids) - set(of_tokenizer)), size)

    def _check_tokens(self, name: str, ids: tuple[int, ...], size: int) -> None:
        expected = f"tokens from 0 to {size - 1}, because the model's vocab_size is {size}"
        self._require(name, all(i < size for i in ids), expected)

    def check_model(self, model: Any) -> None:
        """Checks that a model can be decoded with these settings.

        Raises:
          ConfigError: it cannot.
        """
        check_has_rows(model)
        if self.num_speculative_tokens:
            setting = f"{type(self).__name__}.num_speculative_tokens"
            check_takes_back(model, setting, self.num_speculative_tokens)

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            actual = getattr(self, field.name)
            for kind, (types, expected) in _TYPES.items():
                if field.type in (kind, kind | None) and (actual is not None or field.type is kind):
                    is_right = isinstance(actual, types)
                    is_right &= kind is bool or not isinstance(actual, bool)
                    absent = "" if field.type is kind else ", or None"
                    self._require(field.name, is_right, f"{expected}{absent}")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a row; empty if neither the decoder nor its tokenizer has any."""
        if self.eos_id is None:
            return ()
        return self.eos_id if isinstance(self.eos_id, tuple) else (self.eos_id,)

    def is_eos(self, ids: jax.Array) -> jax.Array:
        """Returns bool, of the shape of `ids`: True at the tokens that end a row."""
        return jnp.isin(ids, jnp.asarray(self.eos_ids, jnp.int32))

    @property
    @abc.abstractmethod
    def num_hyps(self) -> int:
        """How many continuations of a prompt come back: samples, or beams."""

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
        """Returns the continuations of a batch of prompts.

        These are output_ids int32 [B, S, M], the new tokens alone, 0 after the end;
        decode_lengths int32 [B, S], how many they are, the end of text included; logprobs float32
        [B, S, M] of the unfiltered model, 0 after the end; scores float32 [B, S], by which the
        hypotheses of a prompt are sorted. Where the prompt went through the model a token at a
        time also prefix_logprobs float32 [B, P] of its tokens, 0 for the first. `pax_outputs`
        gives the same in Pax's form.

        Args:
          model: has `init_cache(batch_size, length)` and
            `(ids, positions=, paddings=, cache=) -> logits, cache`. The layers of an nnx.Module
            declare with `cache_skips_padding` whether their caches leave padding out, see
            `BaseLayer`; any other object leaves it out of all.
          ids: int32 [B, P], padded on the right with anything.
          prefix_lengths: int32 [B], the length of each prompt without padding; 0 marks a row to
            leave empty.
          keys: random key per prompt, [B].
          temperature: float [B], in place of the decoder's, where it has one.
          per_example_max_decode_steps: int [B], a limit below max_decode_steps.
        """
        prompts = Prompts(ids, prefix_lengths, keys, temperature, per_example_max_decode_steps)
        return self.decode(model, prompts)

    @abc.abstractmethod
    def decode(self, model: Any, prompts: Prompts) -> Outputs:
        """Returns the result of `__call__`."""

    def _require(self, name: str, holds: bool, expected: str) -> None:
        require(holds, f"{type(self).__name__}.{name}", getattr(self, name), expected)


_TYPES = {
    bool: (bool, "True or False"),
    int: (int | np.integer, "a whole number"),
    float: (int | float | np.integer | np.floating, "a number"),
}


def is_token(i: object) -> bool:
    """Returns True for a number that may be an id."""
    return isinstance(i, int | np.integer) and not isinstance(i, bool) and 0 <= i < 2**31
