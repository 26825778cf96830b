"""Prefix sharing: the beginning that prompts have in common goes through the model once."""

import collections
import functools
from collections.abc import Callable, Mapping
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
    """Returns how many tokens of a prompt a pass reads; shared beginnings are multiples of it."""
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
    _, cache = read_blocks(model, row, num_shared[None], cache, jnp.zeros((), jnp.int32), size)
    cache = repeat_rows(cache, batch_dims(model.init_cache), num_rows)
    return prefill_after(decoder, model, prompts, cache, num_shared, size)


def prefill_after(
    decoder: Decoder, model: Any, prompts: Prompts, cache: PyTree, start: jax.Array, size: int
) -> Prefix:
    """Returns the model's state after the prompts, of whose tokens `start` are in the cache."""
    logits, cache = read_blocks(model, prompts.ids, prompts.lengths, cache, start, size)
    num_shared = jnp.where(prompts.lengths > 0, start, 0)
    return Prefix(logits, cache, None, max_steps(decoder, prompts), num_shared)


def num_common(ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns int32 [], how many tokens all prompts of a batch begin with, less than any has.

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


class OneRow:
    """Compiled programs that make a row's cache: empty, or with more tokens of a prompt.

    Args:
      decoder, module, wrap, compiler_options: as of `ContinuousBatching`.
      prompt_length: the longest P.
      run: calls a program, and checks first that this host has memory for it.

    Attributes:
      size: of a block.
    """

    def __init__(
        self, decoder: Decoder, module: Callable[[PyTree], Any], prompt_length: int,
        wrap: Callable[..., Any], compiler_options: Mapping[str, Any] | None,
        run: Callable[..., Any],
    ):
        self.size, self._module, self._wrap, self._run = (
            block_size(decoder, prompt_length), module, wrap, run
        )
        self._compiler_options = compiler_options
        length = cache_length(decoder, prompt_length)
        # Takes the weights although it reads none, so as to run on their devices.
        self._make = jax.jit(
            wrap(lambda mdl_vars: module(mdl_vars).init_cache(1, length)), keep_unused=True
        )
        self._read: Callable[..., PyTree] | None = None

    def beginnings(self, mdl_vars: PyTree, most: int) -> "Beginnings":
        """Returns a keeper of so many beginnings of prompts, as these weights read them."""
        read = functools.partial(self.read, mdl_vars)
        return Beginnings(most, self.size, self.empty(mdl_vars), read)

    def empty(self, mdl_vars: PyTree) -> PyTree:
        """Returns a cache without tokens."""
        cache = self._run(self._make, mdl_vars)
        shardings = jax.tree.map(lambda x: x.sharding, cache)
        if self._read is None:
            # A cache comes back as it went in, or the next call would compile another program.
            self._read = jax.jit(
                self._wrap(self._with_tokens), out_shardings=shardings,
                compiler_options=self._compiler_options,
            )
        return jax.device_put(cache, shardings)

    def read(
        self, mdl_vars: PyTree, cache: PyTree, ids: np.ndarray, start: int, end: int
    ) -> PyTree:
        """Returns the cache with the tokens `start` to `end` of a prompt's ids [P] too."""
        numbers = np.int32(start), np.asarray([end], np.int32)
        return self._run(self._read, mdl_vars, cache, ids[None], *numbers, key=ids.shape)

    def _with_tokens(
        self, mdl_vars: PyTree, cache: PyTree, ids: jax.Array, start: jax.Array, end: jax.Array
    ) -> PyTree:
        return read_blocks(self._module(mdl_vars), ids, end, cache, start, self.size)[1]


class Beginnings:
    """Keeps the caches of beginnings that several prompts had; the least recently used goes.

    A beginning is kept from the second prompt on that has it: only then is it known where it ends,
    which matters for a recurrent state. Each takes the memory of one row of the cache.

    Args:
      most: caches that are kept, beside the empty one.
      size: a beginning's length is a multiple of it.
      empty: a cache of one row without tokens.
      read: returns the cache of a row with the tokens from a number to another of a prompt's ids
        in it: (cache, ids, start, end).

    Attributes:
      num_read: tokens of beginnings that were read so far.
    """

    def __init__(
        self, most: int, size: int, empty: PyTree,
        read: Callable[[PyTree, np.ndarray, int, int], PyTree],
    ):
        self._most, self._size, self._empty, self._read = most, size, empty, read
        self._kept: collections.OrderedDict[tuple[int, ...], PyTree] = collections.OrderedDict()
        self._earlier: collections.deque[np.ndarray] = collections.deque(maxlen=NUM_REMEMBERED)
        self.num_read = 0

    def of(self, ids: np.ndarray, length: int) -> tuple[PyTree, int]:
        """Returns a row's cache, and the number of a prompt's tokens in it.

        Args:
          ids: int32 [P], padded on the right.
          length: without padding; at least one token is left to read.
        """
        prompt = ids[:length]
        begun = [kept for kept in self._kept if _num_equal(np.asarray(kept), prompt) == len(kept)]
        longest = max((kept for kept in begun if len(kept) < length), key=len, default=())
        start, cache = len(longest), self._empty
        if longest:
            cache = self._kept[longest]
            self._kept.move_to_end(longest)
        shared = max((_num_equal(earlier, prompt[:-1]) for earlier in self._earlier), default=0)
        shared -= shared % self._size
        self._earlier.append(prompt)
        if shared > start:
            cache = self._read(cache, ids, start, shared)
            self.num_read += shared - start
            self._kept[tuple(prompt[:shared].tolist())] = cache
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
            start = shared
        return cache, start


def _num_equal(a: np.ndarray, b: np.ndarray) -> int:
    """Returns how many tokens two texts begin with in common."""
    length = min(len(a), len(b))
    is_other = a[:length] != b[:length]
    return int(np.argmax(is_other)) if is_other.any() else length
