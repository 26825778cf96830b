"""Sequences on their way: what a step reads and writes of each, wherever it stands."""

import dataclasses
from typing import Any

import jax

# R rows, V classes, M most new tokens.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The state of R sequences, each at a step of its own.

    A row's tokens depend on nothing but its own entries, so rows can leave, come and change
    places between steps.

    Attributes:
      cache: the model's.
      logits: float32 [R, V] of each row's next token.
      positions: int32 [R], where the next token goes.
      keys: [R]; a step folds in how many tokens the row has.
      temperature: float32 [R].
      max_steps: int32 [R], most new tokens.
      done: bool [R]; such a row stays as it is.
      output_ids: int32 [R, M], 0 after the end.
      logprobs: float32 [R, M], 0 after the end.
      decode_lengths: int32 [R], new tokens so far.
      in_prompt, in_output: bool [R, V], the tokens that occurred; None where nothing asks.
    """

    cache: Any
    logits: jax.Array
    positions: jax.Array
    keys: jax.Array
    temperature: jax.Array
    max_steps: jax.Array
    done: jax.Array
    output_ids: jax.Array
    logprobs: jax.Array
    decode_lengths: jax.Array
    in_prompt: jax.Array | None
    in_output: jax.Array | None
