"""Prefix sharing: the model reads a common prefix of several prompts only once."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.decode.cache_rows import batch_dims, repeat_rows
from praxis_lite.decode.decoder import Decoder, Prompts
from praxis_lite.decode.prefill import Prefix, cache_length, max_steps, read_blocks

# B batch, P longest prompt, V classes.
PyTree = Any

# Maximum block size, in tokens per forward pass, if the decoder's prefill_chunk_size is None.
DEFAULT_BLOCK_SIZE = 64
# Number of recent prompts with which a new prompt is compared.
NUM_RECENT_PROMPTS = 64


def block_size(decoder: Decoder, prompt_length: int) -> int:
    """Returns the number of prompt tokens per forward pass.

    The lengths of shared prefixes are multiples of this number.
    """
    largest, smallest = decoder.prefill_chunk_size, min(8, prompt_length)
    if largest is None:
        largest = max(min(DEFAULT_BLOCK_SIZE, prompt_length // 4), smallest)
    row_length = cache_length(decoder, prompt_length)
    size = next(  # The padded last block must fit into the cache.
        size
        for size in range(min(largest, prompt_length), 0, -1)
        if -(-prompt_length // size) * size <= row_length
    )
    if size < min(largest, smallest):
        raise ConfigError(
            f"{type(decoder).__name__}.num_cached_prefixes={decoder.num_cached_prefixes} requires "
            f"that prompts be read in blocks of at least {min(largest, smallest)} tokens, but "
            f"prompts of length {prompt_length}, padded to a whole number of blocks, exceed the "
            f"{row_length} slots of a cache row. Make the prompt length a multiple of 64, or set "
            "num_cached_prefixes=0."
        )
    return size


def prefill_shared(decoder: Decoder, model: Any, prompts: Prompts) -> Prefix:
    """Reads the prompts like `prefill`, but reads the common prefix of all prompts only once."""
    ids, lengths = prompts.ids, prompts.lengths
    num_rows, prompt_length = ids.shape
    size = block_size(decoder, prompt_length)
    num_shared = common_prefix_length(ids, lengths) // size * size
    cache = model.init_cache(1, cache_length(decoder, prompt_length))
    # Read complete blocks of the prefix in one row, and copy this row of the cache to all rows.
    row = ids[jnp.argmax(lengths > 0)][None, :]
    cache = read_blocks(model, row, num_shared[None], cache, 0, size)[1]
    cache = repeat_rows(cache, batch_dims(model.init_cache), num_rows)
    return prefill_after(decoder, model, prompts, cache, num_shared, size)


def prefill_after(
    decoder: Decoder, model: Any, prompts: Prompts, cache: PyTree, start: jax.Array, size: int
) -> Prefix:
    """Reads prompts whose first `start` tokens are in the cache already, in blocks of `size`."""
    logits, cache, _ = read_blocks(model, prompts.ids, prompts.lengths, cache, start, size)
    num_shared = jnp.where(prompts.lengths > 0, start, 0)
    return Prefix(logits, cache, None, max_steps(decoder, prompts), num_shared)


def common_prefix_length(ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns the length of the common prefix of all prompts, an int32 scalar.

    The prefix is shorter than the shortest prompt, because the model must read at least one token
    of each prompt to compute its logits.

    Args:
      ids: int32 [B, P], the prompts, padded on the right.
      lengths: int32 [B], the length of each prompt; rows with length 0 are ignored.
    """
    has_prompt = lengths > 0
    reference = ids[jnp.argmax(has_prompt)]
    is_equal = jnp.all((ids == reference[None, :]) | ~has_prompt[:, None], axis=0)
    num_equal = jnp.sum(jnp.cumprod(is_equal.astype(jnp.int32)))
    shortest = jnp.min(jnp.where(has_prompt, lengths, 1 + ids.shape[1]))
    return jnp.minimum(num_equal, jnp.where(jnp.any(has_prompt), shortest - 1, 0))


class PrefixCache:
    """An LRU cache of model states, one for each prefix that several prompts share.

    A prefix is stored when a second prompt begins with it, because the length of the shared prefix
    is not known earlier, and a recurrent state cannot be truncated later. Each entry uses as much
    memory as one row of the model's cache.

    Args:
      max_prefixes: Maximum number of stored prefixes, excluding the empty prefix.
      block_size: Prefix lengths are multiples of this number of tokens.
      empty: A row of the model's cache without tokens.
      read: Function that takes (row, ids, start, end) and returns the row after the model has read
        the tokens from `start` to `end` in ids [P].

    Attributes:
      num_read: Number of prefix tokens that the model has read so far.
    """

    def __init__(
        self,
        max_prefixes: int,
        block_size: int,
        empty: PyTree,
        read: Callable[[PyTree, np.ndarray, int, int], PyTree],
    ):
        self._max_prefixes, self._block_size = max_prefixes, block_size
        self._empty, self._read = empty, read
        self._rows: collections.OrderedDict[tuple[int, ...], PyTree] = collections.OrderedDict()
        self._recent: collections.deque[np.ndarray] = collections.deque(maxlen=NUM_RECENT_PROMPTS)
        self.num_read = 0

    def longest(self, ids: np.ndarray, length: int) -> tuple[PyTree, int]:
        """Returns the row for a prompt's longest shared prefix, and the length of the prefix.

        Args:
          ids: int32 [P], the prompt, padded on the right.
          length: Length of the prompt without padding. The returned prefix is always shorter.
        """
        # Look up the longest stored prefix. If a recent prompt has an even longer prefix in common
        # with this prompt, read the remaining tokens of that prefix and store it.
        prompt = ids[:length]
        tokens = tuple(prompt.tolist())
        prefixes = [x for x in self._rows if len(x) < length and x == tokens[: len(x)]]
        longest = max(prefixes, key=len, default=())
        start, row = len(longest), self._empty
        if longest:
            row = self._rows[longest]
            self._rows.move_to_end(longest)
        # The last token is never part of the prefix, because the model must read it to compute
        # logits.
        shared = max((_num_equal(recent, prompt[:-1]) for recent in self._recent), default=0)
        shared -= shared % self._block_size
        self._recent.append(prompt)
        if shared > start:
            row = self._read(row, ids, start, shared)
            self.num_read += shared - start
            self._rows[tokens[:shared]] = row
            if len(self._rows) > self._max_prefixes:
                self._rows.popitem(last=False)
            start = shared
        return row, start


def _num_equal(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the length of the longest common prefix of two arrays of ids."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(np.argmax(differs)) if differs.any() else length
