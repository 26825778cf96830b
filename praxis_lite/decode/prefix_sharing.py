"""Prefix sharing: tokens that prompts begin with in common go through the model once."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import require
from praxis_lite.decode.cache_rows import batch_dims, repeat_rows
from praxis_lite.decode.decoder import Decoder, Prompts
from praxis_lite.decode.prefill import Prefix, cache_length, max_steps, read_blocks

# B batch, P longest prompt, V classes.
PyTree = Any

# Most tokens of a block, which is a pass of the model, if the decoder's prefill_chunk_size is None.
USUAL_BLOCK = 64
# Earlier prompts that a new one is compared with.
NUM_REMEMBERED = 64


def block_size(decoder: Decoder, prompt_length: int) -> int:
    """Returns how many tokens of a prompt a pass reads; a shared prefix is a multiple of it."""
    most, least = decoder.prefill_chunk_size, min(8, prompt_length)
    if most is None:
        most = max(min(USUAL_BLOCK, prompt_length // 4), least)
    room = cache_length(decoder, prompt_length)
    size = next(  # The last block, padded, fits into the cache.
        size for size in range(min(most, prompt_length), 0, -1)
        if -(-prompt_length // size) * size <= room
    )
    require(
        size >= min(most, least), f"{type(decoder).__name__}.num_cached_prefixes",
        decoder.num_cached_prefixes,
        f"0 where prompts are padded to {prompt_length} tokens and a row of the cache holds "
        f"{room}, into which no blocks of {least} tokens or more "
        "fit", "Or make the length of prompts a multiple of 64.",
    )
    return size


def prefill_shared(decoder: Decoder, model: Any, prompts: Prompts) -> Prefix:
    """Returns the model's state after the prompts; the blocks that all begin with are read once."""
    ids, lengths = prompts.ids, prompts.lengths
    num_rows, prompt_length = ids.shape
    size = block_size(decoder, prompt_length)
    num_shared = num_common(ids, lengths) // size * size
    cache = model.init_cache(1, cache_length(decoder, prompt_length))
    row = ids[jnp.argmax(lengths > 0)][None, :]
    cache = read_blocks(model, row, num_shared[None], cache, 0, size)[1]
    cache = repeat_rows(cache, batch_dims(model.init_cache), num_rows)
    return prefill_after(decoder, model, prompts, cache, num_shared, size)


def prefill_after(
    decoder: Decoder, model: Any, prompts: Prompts, cache: PyTree, start: jax.Array, size: int
) -> Prefix:
    """Returns the model's state after prompts whose first `start` tokens are in the cache."""
    logits, cache, _ = read_blocks(model, prompts.ids, prompts.lengths, cache, start, size)
    num_shared = jnp.where(prompts.lengths > 0, start, 0)
    return Prefix(logits, cache, None, max_steps(decoder, prompts), num_shared)


def num_common(ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns int32 [], the length of the longest common prefix, less than that of any prompt.

    Args:
      ids: int32 [B, P].
      lengths: int32 [B]; 0 marks a row that is left empty, and does not count.
    """
    is_row = lengths > 0
    reference = ids[jnp.argmax(is_row)]
    is_equal = jnp.all((ids == reference[None, :]) | ~is_row[:, None], axis=0)
    num_equal = jnp.sum(jnp.cumprod(is_equal.astype(jnp.int32)))
    fewest = jnp.min(jnp.where(is_row, lengths, 1 + ids.shape[1]))
    return jnp.minimum(num_equal, jnp.where(jnp.any(is_row), fewest - 1, 0))


class PrefixCache:
    """An LRU cache of the rows of prefixes that several prompts have in common.

    A prefix is stored when the second prompt with it comes: only then is it known where it ends,
    which matters for a recurrent state. Each takes the memory of one row of the cache.

    Args:
      most: most prefixes that are stored, in addition to the empty one.
      size: the length of a prefix is a multiple of it.
      empty: a row of the cache without tokens.
      read: (row, ids, start, end) -> the row with the tokens `start` to `end` of ids [P] added.

    Attributes:
      num_read: tokens of prefixes that were read so far.
    """

    def __init__(
        self, most: int, size: int, empty: PyTree,
        read: Callable[[PyTree, np.ndarray, int, int], PyTree],
    ):
        self._most, self._size, self._empty, self._read = most, size, empty, read
        self._rows: collections.OrderedDict[tuple[int, ...], PyTree] = collections.OrderedDict()
        self._earlier: collections.deque[np.ndarray] = collections.deque(maxlen=NUM_REMEMBERED)
        self.num_read = 0

    def longest(self, ids: np.ndarray, length: int) -> tuple[PyTree, int]:
        """Returns a row with the longest prefix of a prompt, and how many tokens that has.

        Args:
          ids: int32 [P], padded on the right.
          length: without padding; at least one token is left to read.
        """
        prompt = ids[:length]
        tokens = tuple(prompt.tolist())
        prefixes = [x for x in self._rows if len(x) < length and x == tokens[: len(x)]]
        longest = max(prefixes, key=len, default=())
        start, row = len(longest), self._empty
        if longest:
            row = self._rows[longest]
            self._rows.move_to_end(longest)
        shared = max((_num_equal(earlier, prompt[:-1]) for earlier in self._earlier), default=0)
        shared -= shared % self._size
        self._earlier.append(prompt)
        if shared > start:
            row = self._read(row, ids, start, shared)
            self.num_read += shared - start
            self._rows[tokens[:shared]] = row
            if len(self._rows) > self._most:
                self._rows.popitem(last=False)
            start = shared
        return row, start


def _num_equal(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the length of the longest common prefix of two arrays of ids."""
    length = min(len(a), len(b))
    is_other = a[:length] != b[:length]
    return int(np.argmax(is_other)) if is_other.any() else length
