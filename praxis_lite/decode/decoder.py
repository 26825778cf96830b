"""What every way to decode has in common: its limits, its ends, and its call."""

import abc
import dataclasses
from typing import Any

import jax

from praxis_lite.errors import ConfigError

# Names, [rows, samples or beams, new tokens] first; see `Decoder.__call__`.
Outputs = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder(abc.ABC):
    """Continues prompts with a model. Names of settings are those of Pax's DecoderHParams.

    Attributes:
      max_decode_steps: most new tokens per prompt, the end of text included.
      seqlen: most tokens of a row, its prompt included; None: only max_decode_steps limits it.
        (Pax's default of 0 means "must be set".)
      min_decode_steps: new tokens that must precede an end of text. In Pax only beam search
        heeds it.
      eos_id: token, or tokens, of which each ends a row; None: the tokenizer's. (Pax: 2.)
      fprop_for_prefix: the prompt goes through the model in one forward pass; else a token at a
        time, as Pax does by default. The continuation is the same.
    """

    max_decode_steps: int = 128
    seqlen: int | None = None
    min_decode_steps: int = 0
    eos_id: int | tuple[int, ...] | None = None
    fprop_for_prefix: bool = True

    def __post_init__(self):
        # Lists come from JSON and the command line; a decoder is a static, hashable value.
        if isinstance(self.eos_id, list):
            object.__setattr__(self, "eos_id", tuple(self.eos_id))
        self._require("max_decode_steps", self.max_decode_steps >= 1, "1 or more")
        self._require("seqlen", self.seqlen is None or self.seqlen >= 1, "None, or 1 or more")
        self._require(
            "min_decode_steps",
            0 <= self.min_decode_steps < self.max_decode_steps,
            f"0 or more and less than max_decode_steps ({self.max_decode_steps})",
        )
        self._require(
            "eos_id",
            self.eos_id is None or all(isinstance(i, int) and i >= 0 for i in self.eos_ids),
            "a token, a tuple of tokens, or None for the tokenizer's",
        )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a row; none where eos_id was left to a tokenizer that has none."""
        if self.eos_id is None:
            return ()
        return self.eos_id if isinstance(self.eos_id, tuple) else (self.eos_id,)

    @property
    @abc.abstractmethod
    def num_hyps(self) -> int:
        """How many continuations of a prompt come back: samples, or beams."""

    @abc.abstractmethod
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

        With B prompts, S = num_hyps and M = max_decode_steps: output_ids int32 [B, S, M], the new
        tokens alone, 0 after the end; decode_lengths int32 [B, S], how many they are, the end of
        text included; logprobs float32 [B, S, M] of the unfiltered model, 0 after the end; scores
        float32 [B, S], by which hypotheses of a prompt are sorted. Where the prompt went through
        the model a token at a time also prefix_logprobs float32 [B, P] of its tokens, 0 for the
        first. `pax_outputs` gives the same in Pax's form.

        Args:
          model: has `init_cache(batch_size, length)` and
            `(ids, positions=, paddings=, cache=) -> logits, cache`.
          ids: int32 [B, P], padded on the right with anything.
          prefix_lengths: int32 [B]: true length of each prompt; 0 marks a row to leave empty.
          keys: random key per prompt, [B].
          temperature: float [B], in place of the decoder's, where it has one.
          per_example_max_decode_steps: int [B], a limit below max_decode_steps.
        """

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigError(
                f"{type(self).__name__}.{name} is {getattr(self, name)!r}; wanted is {wanted}."
            )
