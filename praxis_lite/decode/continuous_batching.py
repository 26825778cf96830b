"""Continuous batching: as soon as a sequence ends, its row is assigned to the next prompt."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.decode.cache_rows import batch_dims, put_rows
from praxis_lite.decode.decoder import Prompts
from praxis_lite.decode.loop import DecodeState, advance, start
from praxis_lite.decode.prefill import cache_length, read_blocks
from praxis_lite.decode.prefix_sharing import PrefixCache, block_size, prefill_after
from praxis_lite.decode.rows import NewTokens, Prompt, Rows
from praxis_lite.decode.sampling import Greedy
from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.host.host_memory import FirstRuns

__all__ = ("ContinuousBatching", "Prompt")

# R rows, P longest prompt, M maximum number of new tokens.
PyTree = Any
Function = Callable[..., Any]

# Maximum number of prompt tokens per prefill call. Prefilling several short prompts takes as long
# as prefilling one, because most of the time is spent reading the weights. For long prompts, a
# larger batch would take more memory without being faster.
MAX_TOKENS_PER_PREFILL = 1024


class ContinuousBatching:
    """Decodes any number of prompts, `num_rows` at a time, without recompilation.

    One compiled function runs decode steps. The others prefill prompts into rows; there is one
    function for each combination of a padded length and a number of prompts from `sizes`. The
    state, including the caches, is donated to each call. The tokens generated for a prompt are the
    same as if the prompt were decoded alone.

    Between calls, each array of the state has the sharding that the model chose, or is replicated
    if its dims are not divisible by the sizes of the mesh axes. num_rows should therefore be
    divisible by the number of devices over which the batch is sharded.

    Args:
      decoder: Greedy or Sample; each sample for a prompt is a separate Prompt.
      module: Maps mdl_vars to the model; called inside the compiled functions.
      num_rows: Number of rows, R.
      prompt_length: Padded length of prompts, P, or several padded lengths, which must all require
        the same cache length; see decoder.seqlen.
      wrap: Transforms `function(mdl_vars, ...)` into a function to compile with jit. Pass the
        partitioner's `with_mdl_vars` with `has_splits=True`, which handles the mesh and the storage
        format of mdl_vars.
      compiler_options: The partitioner's `decode_options`.
      advice: Advice for the error that is raised if there is not enough memory, in complete
        sentences.

    Attributes:
      latest: The rows of the latest stream, including the counts of steps and prompts.
    """

    def __init__(
        self,
        decoder: Greedy,
        module: Callable[[PyTree], Any],
        num_rows: int,
        prompt_length: int | Sequence[int],
        *,
        wrap: Callable[[Function], Function] = lambda function: function,
        compiler_options: Mapping[str, Any] | None = None,
        advice: str = "Make decoder.num_cache_slots, decoder.max_decode_steps or the longest "
        "prompt smaller.",
    ):
        if not isinstance(decoder, Greedy):
            raise ConfigError(
                f"{type(decoder).__name__} does not support continuous batching, in which rows are "
                "at different steps. Use Greedy or Sample."
            )
        lengths = (prompt_length,) if isinstance(prompt_length, int) else tuple(prompt_length)
        cache_lengths = {cache_length(decoder, length) for length in lengths}
        if len(cache_lengths) != 1:
            raise ConfigError(
                f"ContinuousBatching: prompts padded to {sorted(lengths)} tokens need caches with "
                f"{sorted(cache_lengths)} slots; expected the same number of slots. Set "
                "decoder.seqlen to this number, and decoder.max_decode_steps to at least seqlen "
                "minus the shortest prompt length."
            )
        self._decoder, self._module = decoder, module
        self.num_rows, self.prompt_lengths = num_rows, lengths
        length = cache_length(decoder, max(lengths))
        # Both functions take the weights only so that they run on the same devices as the weights.
        self._empty = jax.jit(wrap(self._empty_state), keep_unused=True)
        self._empty_row = jax.jit(
            wrap(lambda mdl_vars: module(mdl_vars).init_cache(1, length)), keep_unused=True
        )
        self._wrap = wrap
        self._compiler_options = None if compiler_options is None else dict(compiler_options)
        # Compiled `_insert` and `_advance`; None until `empty` has determined their shardings.
        self._steps: tuple[Function, Function] | None = None
        self._runs = FirstRuns(f"Decoding {num_rows} rows at a time", advice)
        self.latest: Rows | None = None
        self._read_prefix: Function | None = None
        self._block_size: int | None = None
        if decoder.num_cached_prefixes:
            self._block_size = block_size(decoder, max(lengths))

    def stream(
        self,
        mdl_vars: PyTree,
        prompts: Iterable[Prompt],
        *,
        num_steps: int | None = None,
        text_of: Callable[[Prompt], ContinuationText] | None = None,
    ) -> Iterator[NewTokens]:
        """Yields the new tokens of all prompts as they are decoded.

        Args:
          mdl_vars: The weights.
          prompts: Prompts to decode; the next prompt is requested when a row is free.
          num_steps: Maximum number of steps between two reports of new tokens. If None, tokens are
            reported when a row ends.
          text_of: Function that creates the text of a prompt's continuation. If given, each report
            is searched for stop strings in any tokenization, and a continuation ends at the first
            stop string.
        """
        num_steps = self._decoder.max_decode_steps if num_steps is None else num_steps
        rows = self.latest = self.rows(mdl_vars)
        waiting = iter(prompts)
        upcoming = next(waiting, None)
        texts: dict[int, ContinuationText] = {}
        # Fill the free rows, then decode until a row is free for the next prompt.
        while upcoming is not None or rows.num_taken:
            while upcoming is not None and rows.num_free:
                index = rows.submit(upcoming)
                if text_of is not None:
                    texts[index] = text_of(upcoming)
                upcoming = next(waiting, None)
            for new in rows.advance(num_steps, until_one_ends=upcoming is not None):
                if text_of is not None and not new.done:
                    for token in new.ids.tolist():
                        texts[new.index].push(token)
                    if texts[new.index].is_stopped:
                        rows.cancel(new.index)
                        new = new._replace(done=True)
                if new.done:
                    texts.pop(new.index, None)
                yield new

    def rows(self, mdl_vars: PyTree) -> Rows:
        """Allocates free rows for a stream, on the same devices as the weights."""
        return Rows(self, mdl_vars)

    def prefix_cache(self, mdl_vars: PyTree) -> PrefixCache | None:
        """Returns an LRU cache of prompt prefixes for the weights; None without prefix sharing."""
        if self._block_size is None:
            return None
        empty = self._runs.run(self._empty_row, mdl_vars)
        shardings = jax.tree.map(lambda x: x.sharding, empty)
        if self._read_prefix is None:
            # Return rows with the sharding of the input, so that the next call is not recompiled.
            self._read_prefix = jax.jit(
                self._wrap(self._with_prefix),
                out_shardings=shardings,
                compiler_options=self._compiler_options,
            )

        def read(row: PyTree, ids: np.ndarray, start: int, end: int) -> PyTree:
            numbers = np.int32(start), np.asarray([end], np.int32)
            return self._runs.run(
                self._read_prefix, mdl_vars, row, ids[None], *numbers, key=ids.shape
            )

        empty = jax.device_put(empty, shardings)
        return PrefixCache(self._decoder.num_cached_prefixes, self._block_size, empty, read)

    def empty(self, mdl_vars: PyTree) -> DecodeState:
        """Returns an empty decode state, sharded like the states that later calls return."""
        state = self._runs.run(self._empty, mdl_vars)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        if self._steps is None:
            # Return the state with the input's shardings, so that the next call is not recompiled.
            jitted = functools.partial(
                jax.jit, donate_argnums=1, compiler_options=self._compiler_options
            )
            self._steps = (
                jitted(self._wrap(self._insert), out_shardings=shardings),
                jitted(self._wrap(self._advance), out_shardings=(shardings, None)),
            )
        # Use the same shardings as for the outputs, so that the second call is not recompiled.
        return jax.device_put(state, shardings)

    def sizes(self, prompt_length: int) -> list[int]:
        """Returns the numbers of prompts that can be prefilled together, largest first.

        They are powers of 4, to limit the number of compiled functions. With prefix sharing,
        prompts are prefilled one at a time, because their prefixes differ.
        """
        if self._block_size is not None:
            return [1]
        largest = max(1, min(self.num_rows, MAX_TOKENS_PER_PREFILL // prompt_length))
        powers = [4**n for n in range(largest.bit_length()) if 4**n <= largest]
        return powers[::-1]

    def insert(
        self,
        mdl_vars: PyTree,
        state: DecodeState,
        rows: Sequence[int],
        prompts: Sequence[Prompt],
        prefix: tuple[PyTree, int] | None = None,
    ) -> DecodeState:
        """Prefills prompts of the same padded length into rows; donates the state.

        Args:
          mdl_vars: The weights.
          state: The current state.
          rows: The row of each prompt.
          prompts: Prompts; their number is one of `sizes`.
          prefix: For a single prompt, a row of the cache that contains the prompt's first tokens,
            and the number of these tokens.

        Returns:
          The new state.
        """
        assert self._steps is not None, "call `empty` first"
        decoder = self._decoder
        defaults: dict[str, tuple[float | None, Callable[[Any], np.generic]]] = {
            "temperature": (decoder.temperature, np.float32),
            "per_example_max_decode_steps": (decoder.max_decode_steps, np.int32),
            "top_k": (decoder.top_k, np.int32),
            "top_p": (decoder.top_p, np.float32),
        }

        def with_settings(prompt: Prompt) -> Prompts:
            # Pass NumPy arrays; jit converts them to the array types that Prompts declares.
            fields: dict[str, Any] = {
                "ids": np.asarray(prompt.ids, np.int32),
                "lengths": np.int32(prompt.length),
                "keys": prompt.key,
                "wants_likeliest": np.bool_(prompt.wants_likeliest),
            }
            for name, (default, dtype) in defaults.items():
                value = getattr(prompt, name)
                value = default if value is None else value
                fields[name] = None if value is None else dtype(value)
            return Prompts(**fields)

        return self._runs.run(
            self._steps[0],
            mdl_vars,
            state,
            np.asarray(rows, np.int32),
            tuple(map(with_settings, prompts)),
            None if prefix is None else (prefix[0], np.int32(prefix[1])),
            key=(len(prompts), np.shape(prompts[0].ids)),
        )

    def advance(
        self,
        mdl_vars: PyTree,
        state: DecodeState,
        num_steps: int,
        until_one_ends: bool,
        taken: set[int],
    ) -> tuple[DecodeState, dict[str, np.ndarray]]:
        """Runs `loop.advance` on the device; donates the state.

        Args:
          mdl_vars: The weights.
          state: The current state.
          num_steps: Maximum number of steps.
          until_one_ends: Whether to stop as soon as any active row ends.
          taken: Rows with a prompt; other rows remain unchanged.

        Returns:
          The new state, and a copy of its outputs on the host.
        """
        assert self._steps is not None, "call `empty` first"
        is_taken = np.isin(np.arange(self.num_rows), list(taken))
        state, report = self._runs.run(
            self._steps[1],
            mdl_vars,
            state,
            np.int32(num_steps),
            np.bool_(until_one_ends),
            is_taken,
        )
        return state, jax.device_get(report)

    def _empty_state(self, mdl_vars: PyTree) -> DecodeState:
        decoder, num_rows, model = self._decoder, self.num_rows, self._module(mdl_vars)
        keys = jax.random.split(jax.random.key(0), num_rows)

        def start_empty() -> DecodeState:
            ids = jnp.zeros((num_rows, max(self.prompt_lengths)), jnp.int32)
            return start(decoder, model, Prompts(ids, jnp.zeros((num_rows,), jnp.int32), keys))[0]

        shapes = jax.eval_shape(start_empty)
        # Call init_cache instead of creating zeros, because it also sets the cache's sharding.
        cache = model.init_cache(num_rows, cache_length(decoder, max(self.prompt_lengths)))
        rest = dataclasses.replace(shapes, cache=None, keys=None)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        return dataclasses.replace(zeros, cache=cache, keys=keys, done=jnp.ones_like(zeros.done))

    def _insert(
        self,
        mdl_vars: PyTree,
        state: DecodeState,
        rows: jax.Array,
        prompts: tuple[Prompts, ...],
        prefix: tuple[PyTree, jax.Array] | None,
    ) -> DecodeState:
        model, prefilled = self._module(mdl_vars), None
        batch: Prompts = jax.tree.map(lambda *x: jnp.stack(x), *prompts)
        if prefix is not None:
            assert self._block_size is not None
            prefilled = prefill_after(self._decoder, model, batch, *prefix, self._block_size)
        new, _ = start(self._decoder, model, batch, prefilled)
        # Rows are the first dim of every array except those in the cache.
        dims = jax.tree.map(lambda x: 0, dataclasses.replace(state, cache=None))
        dims = dataclasses.replace(dims, cache=batch_dims(model.init_cache))
        return put_rows(state, dims, new, rows)

    def _with_prefix(
        self, mdl_vars: PyTree, row: PyTree, ids: jax.Array, start: jax.Array, end: jax.Array
    ) -> PyTree:
        assert self._block_size is not None
        return read_blocks(self._module(mdl_vars), ids, end, row, start, self._block_size)[1]

    def _advance(
        self,
        mdl_vars: PyTree,
        state: DecodeState,
        num_steps: jax.Array,
        until_one_ends: jax.Array,
        is_taken: jax.Array,
    ) -> tuple[DecodeState, dict[str, jax.Array]]:
        state = dataclasses.replace(state, done=state.done | ~is_taken)
        model = self._module(mdl_vars)
        state, steps = advance(self._decoder, model, state, num_steps, until_one_ends)
        names = ("done", "decode_lengths", "output_ids", "logprobs", "likeliest", "num_model_steps")
        return state, {"num_steps": steps} | {name: getattr(state, name) for name in names}
