"""Continuous batching: a row whose sequence has ended takes the next prompt at once."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import ConfigError, require
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

# R rows, P longest prompt, M most new tokens.
PyTree = Any
Program = Callable[..., Any]

# Most tokens of prompts that go through the model together. Several short prompts take the time of
# one, which is that of reading the weights; long ones save none, and take memory.
TOKENS_TOGETHER = 1024


class ContinuousBatching:
    """Decodes any number of prompts, `num_rows` at a time, by a few compiled programs.

    One makes steps; others put prompts into rows, of a length and a number each that `sizes` has.
    The state, caches included, is donated from call to call. A prompt's tokens are those that it
    would get alone. Between calls each array of the state stays split as the model splits it if
    that is even, and is replicated otherwise: choose num_rows so that the devices of the batch
    divide it.

    Args:
      decoder: Greedy or Sample; each sample of a prompt is a separate Prompt.
      module: from mdl_vars to the model, inside a compiled program.
      num_rows: R.
      prompt_length: P, or several lengths to which prompts may be padded. Their caches must be of
        one length, which decoder.seqlen can set.
      wrap: turns `function(mdl_vars, ...)` into a function that jit compiles: the partitioner's
        `with_mdl_vars`, which knows the mesh and how mdl_vars are stored, with `has_splits`.
      compiler_options: the partitioner's `decode_options`.
      advice: what to change if memory is short, in complete sentences.

    Attributes:
      latest: the rows of the latest stream, which count its steps and prompts.
    """

    def __init__(
        self,
        decoder: Greedy,
        module: Callable[[PyTree], Any],
        num_rows: int,
        prompt_length: int | Sequence[int],
        *,
        wrap: Callable[[Program], Program] = lambda function: function,
        compiler_options: Mapping[str, Any] | None = None,
        advice: str = "Make decoder.num_cache_slots, decoder.max_decode_steps or the longest "
        "prompt smaller.",
    ):
        if not isinstance(decoder, Greedy):
            raise ConfigError(
                f"{type(decoder).__name__} cannot decode by continuous batching, where every row "
                "is at a different step. Use Greedy or Sample."
            )
        lengths = (prompt_length,) if isinstance(prompt_length, int) else tuple(prompt_length)
        of_caches = {cache_length(decoder, length) for length in lengths}
        require(
            len(of_caches) == 1, "The lengths of the caches of ContinuousBatching",
            sorted(of_caches), "one length", "Set decoder.seqlen to it, and more max_decode_steps.",
        )
        self._decoder, self._module = decoder, module
        self.num_rows, self.prompt_lengths = num_rows, lengths
        length = cache_length(decoder, max(lengths))
        # Both take the weights although they read none, so as to run on their devices.
        self._empty = jax.jit(wrap(self._empty_state), keep_unused=True)
        self._empty_row = jax.jit(
            wrap(lambda mdl_vars: module(mdl_vars).init_cache(1, length)), keep_unused=True
        )
        self._wrap, self._compiler_options = wrap, compiler_options
        self._programs: tuple[Program, Program] | None = None
        self._runs = FirstRuns(f"Decoding {num_rows} rows at a time", advice)
        self.latest: Rows | None = None
        self._read_prefix: Program | None = None
        self._block_size = None
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
        """Yields new tokens of the prompts that are in rows, as they come.

        Args:
          prompts: taken one by one, each as soon as a row is free.
          num_steps: most steps between two looks at the tokens; None: until one row ends.
          text_of: Makes the text of a prompt's continuation, whose stop string ends it at the
            next look, no matter which tokens spell it.
        """
        num_steps = self._decoder.max_decode_steps if num_steps is None else num_steps
        rows = self.latest = self.rows(mdl_vars)
        waiting = iter(prompts)
        upcoming = next(waiting, None)
        texts: dict[int, ContinuationText] = {}
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
        """Returns rows that are all free, on the devices of the weights."""
        return Rows(self, mdl_vars)

    def prefix_cache(self, mdl_vars: PyTree) -> PrefixCache | None:
        """Returns an LRU cache of prompt prefixes for these weights; None if none are shared."""
        if self._block_size is None:
            return None
        empty = self._runs.run(self._empty_row, mdl_vars)
        shardings = jax.tree.map(lambda x: x.sharding, empty)
        if self._read_prefix is None:
            # A row comes back as it went in, or the next call would compile another program.
            self._read_prefix = jax.jit(
                self._wrap(self._with_prefix), out_shardings=shardings,
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
        """Returns a state whose rows are all free, on the devices as it stays from call to call."""
        state = self._runs.run(self._empty, mdl_vars)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        if self._programs is None:
            # The state comes back as it went in, or the next call would compile another program.
            jitted = functools.partial(
                jax.jit, donate_argnums=1, compiler_options=self._compiler_options
            )
            self._programs = (
                jitted(self._wrap(self._insert), out_shardings=shardings),
                jitted(self._wrap(self._advance), out_shardings=(shardings, None)),
            )
        # Placed as the programs' outputs are, or the first call would compile another program.
        return jax.device_put(state, shardings)

    def sizes(self, prompt_length: int) -> list[int]:
        """Returns how many prompts of a length may go through the model together, largest first.

        Powers of 4, because each compiles a program; 1 where prefixes are shared, which differ.
        """
        if self._block_size is not None:
            return [1]
        most = max(1, min(self.num_rows, TOKENS_TOGETHER // prompt_length))
        powers = [4**n for n in range(most.bit_length()) if 4**n <= most]
        return powers[::-1]

    def insert(
        self, mdl_vars: PyTree, state: DecodeState, rows: Sequence[int],
        prompts: Sequence[Prompt], prefix: tuple[PyTree, int] | None = None,
    ) -> DecodeState:
        """Returns the state with prompts of equal length in rows; the state given is donated.

        Args:
          rows: of each prompt.
          prompts: as many as one of `sizes`.
          prefix: of a single prompt: a row of the cache, and how many of its tokens are in it.
        """
        decoder = self._decoder
        defaults = {
            "temperature": (decoder.temperature, np.float32),
            "per_example_max_decode_steps": (decoder.max_decode_steps, np.int32),
            "top_k": (decoder.top_k, np.int32),
            "top_p": (decoder.top_p, np.float32),
        }

        def with_settings(prompt: Prompt) -> Prompts:
            settings = {}
            for name, (default, dtype) in defaults.items():
                given = getattr(prompt, name)
                given = default if given is None else given
                settings[name] = None if given is None else dtype(given)
            return Prompts(
                np.asarray(prompt.ids, np.int32), np.int32(prompt.length), prompt.key, **settings,
                wants_likeliest=np.bool_(prompt.wants_likeliest),
            )

        if prefix is not None:
            prefix = (prefix[0], np.int32(prefix[1]))
        return self._runs.run(
            self._programs[0], mdl_vars, state, np.asarray(rows, np.int32),
            tuple(map(with_settings, prompts)), prefix,
            key=(len(prompts), np.shape(prompts[0].ids)),
        )

    def advance(
        self, mdl_vars: PyTree, state: DecodeState, num_steps: int, until_one_ends: bool,
        taken: set[int],
    ) -> tuple[DecodeState, dict[str, np.ndarray]]:
        """Returns the state after `loop.advance`, and the host's report; donates the state.

        Args:
          taken: the rows that have a prompt; the others stay as they are.
        """
        is_taken = np.isin(np.arange(self.num_rows), list(taken))
        state, report = self._runs.run(
            self._programs[1], mdl_vars, state, np.int32(num_steps), np.bool_(until_one_ends),
            is_taken,
        )
        return state, jax.device_get(report)

    def _empty_state(self, mdl_vars: PyTree) -> DecodeState:
        decoder, num_rows, model = self._decoder, self.num_rows, self._module(mdl_vars)
        keys = jax.random.split(jax.random.key(0), num_rows)

        def started() -> DecodeState:
            ids = jnp.zeros((num_rows, max(self.prompt_lengths)), jnp.int32)
            return start(decoder, model, Prompts(ids, jnp.zeros((num_rows,), jnp.int32), keys))[0]

        shapes = jax.eval_shape(started)
        # Not zeros: the model's own cache specifies how it is split.
        cache = model.init_cache(num_rows, cache_length(decoder, max(self.prompt_lengths)))
        rest = dataclasses.replace(shapes, cache=None, keys=None)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        return dataclasses.replace(zeros, cache=cache, keys=keys, done=jnp.ones_like(zeros.done))

    def _insert(
        self, mdl_vars: PyTree, state: DecodeState, rows: jax.Array, prompts: tuple[Prompts, ...],
        prefix: tuple[PyTree, jax.Array] | None,
    ) -> DecodeState:
        model, prefilled = self._module(mdl_vars), None
        prompts = jax.tree.map(lambda *x: jnp.stack(x), *prompts)
        if prefix is not None:
            prefilled = prefill_after(self._decoder, model, prompts, *prefix, self._block_size)
        new, _ = start(self._decoder, model, prompts, prefilled)
        dims = jax.tree.map(lambda x: 0, dataclasses.replace(state, cache=None))
        dims = dataclasses.replace(dims, cache=batch_dims(model.init_cache))
        return put_rows(state, dims, new, rows)

    def _with_prefix(
        self, mdl_vars: PyTree, row: PyTree, ids: jax.Array, start: jax.Array, end: jax.Array
    ) -> PyTree:
        return read_blocks(self._module(mdl_vars), ids, end, row, start, self._block_size)[1]

    def _advance(
        self, mdl_vars: PyTree, state: DecodeState, num_steps: jax.Array,
        until_one_ends: jax.Array, is_taken: jax.Array,
    ) -> tuple[DecodeState, dict[str, jax.Array]]:
        state = dataclasses.replace(state, done=state.done | ~is_taken)
        model = self._module(mdl_vars)
        state, steps = advance(self._decoder, model, state, num_steps, until_one_ends)
        names = (
            "done", "decode_lengths", "output_ids", "logprobs", "likeliest", "num_model_steps"
        )
        return state, {"num_steps": steps} | {name: getattr(state, name) for name in names}
