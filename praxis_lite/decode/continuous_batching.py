"""Continuous batching: a row whose sequence has ended takes the next prompt at once."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.decode.cache_rows import batch_dims, put_row
from praxis_lite.decode.decoder import Prompts
from praxis_lite.decode.loop import DecodeState, advance, start
from praxis_lite.decode.prefill import cache_length
from praxis_lite.decode.sampling import Greedy
from praxis_lite.host.host_memory import FirstRuns

# R rows, P longest prompt, M most new tokens.
PyTree = Any
Program = Callable[..., Any]


class Prompt(NamedTuple):
    """A prompt that waits for a row. A field of None is the decoder's."""

    ids: np.ndarray  # int32 [P], padded on the right.
    length: int  # Without padding.
    key: jax.Array  # The sample's, of `loop.sample_keys`.
    temperature: float | None = None
    per_example_max_decode_steps: int | None = None


class NewTokens(NamedTuple):
    """New tokens of a prompt since the last time."""

    index: int  # Of the prompt, in the order in which they were taken.
    ids: np.ndarray  # int32 [n]; n may be 0 at the end.
    logprobs: np.ndarray  # float32 [n].
    done: bool  # The prompt has ended.


class ContinuousBatching:
    """Decodes any number of prompts, `num_rows` at a time, by two compiled programs.

    One puts a prompt into a row, one makes steps; the state, caches included, is donated from
    call to call. A prompt's tokens are those that it would get alone. Between calls each array of
    the state stays split as the model splits it, if that is even, and is whole on every device
    otherwise: choose num_rows so that the devices of the batch divide it.

    Args:
      decoder: Greedy or Sample; each sample of a prompt is a Prompt of its own.
      module: from mdl_vars to the model, inside a compiled program.
      num_rows: R.
      prompt_length: P.
      wrap: makes of `function(mdl_vars, ...)` one that jit compiles: the partitioner's
        `with_mdl_vars`, which knows how mdl_vars are stored and the mesh, with `has_splits`.
      compiler_options: the partitioner's `decode_options`.

    Attributes:
      num_steps: model steps that the latest stream has made, each of them for all rows.
      num_prefills: prompts that it has taken.
    """

    def __init__(
        self,
        decoder: Greedy,
        module: Callable[[PyTree], Any],
        num_rows: int,
        prompt_length: int,
        *,
        wrap: Callable[[Program], Program] = lambda function: function,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        if not isinstance(decoder, Greedy):
            raise ConfigError(
                f"{type(decoder).__name__} cannot decode by continuous batching, where every row "
                "has a step of its own. Use Greedy or Sample."
            )
        self._decoder, self._module = decoder, module
        self._num_rows, self._prompt_length = num_rows, prompt_length
        # Takes the weights although it reads none, so as to run on their devices.
        self._empty = jax.jit(wrap(self._empty_state), keep_unused=True)
        self._wrap, self._compiler_options = wrap, compiler_options
        self._programs: tuple[Program, Program] | None = None
        self._runs = FirstRuns(
            f"Decoding {num_rows} rows at a time",
            "Make decoder.num_cache_slots, decoder.max_decode_steps or the longest prompt smaller.",
        )
        self.num_steps = self.num_prefills = 0

    def stream(
        self,
        mdl_vars: PyTree,
        prompts: Iterable[Prompt],
        *,
        num_steps: int | None = None,
        should_stop: Callable[[int, np.ndarray], bool] | None = None,
    ) -> Iterator[NewTokens]:
        """Yields new tokens as they come, of whichever prompts are in a row.

        Args:
          prompts: taken one by one, each when a row is free for it.
          num_steps: most steps between two looks at the tokens; None: until one row ends.
          should_stop: called at every look, with a prompt's index and all its new tokens; True
            ends it here, such as at a text that no fixed tokens spell.
        """
        self.num_steps = self.num_prefills = 0
        chunk = self._decoder.max_decode_steps if num_steps is None else num_steps
        state = self.empty(mdl_vars)
        waiting = enumerate(prompts)
        upcoming = next(waiting, None)
        taken: dict[int, tuple[int, int]] = {}  # By row: its prompt's index and tokens seen.
        while upcoming is not None or taken:
            for row in range(self._num_rows):
                if row not in taken and upcoming is not None:
                    index, prompt = upcoming
                    state = self.insert(mdl_vars, state, row, prompt)
                    taken[row] = (index, 0)
                    self.num_prefills += 1
                    upcoming = next(waiting, None)
            state, report = self.advance(mdl_vars, state, chunk, upcoming is not None, set(taken))
            self.num_steps += int(report["num_steps"])
            for row, (index, seen) in list(taken.items()):
                length = int(report["decode_lengths"][row])
                ids, done = report["output_ids"][row, :length], bool(report["done"][row])
                if not done and should_stop is not None and length > seen:
                    done = should_stop(index, ids)
                if done:
                    del taken[row]
                else:
                    taken[row] = (index, length)
                if done or length > seen:
                    new = slice(seen, length)
                    yield NewTokens(index, ids[new], report["logprobs"][row, new], done)

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

    def insert(
        self, mdl_vars: PyTree, state: DecodeState, row: int, prompt: Prompt
    ) -> DecodeState:
        """Returns the state with a prompt in a row; the state that is given is donated."""
        shape, expected = np.shape(prompt.ids), (self._prompt_length,)
        require(shape == expected, "The shape of a prompt's ids", shape, f"{expected}", "Pad it.")
        ids, length, key, temperature, max_steps = prompt
        if temperature is None:
            temperature = self._decoder.temperature
        if max_steps is None:
            max_steps = self._decoder.max_decode_steps
        prompts = Prompts(
            np.asarray(ids, np.int32), np.int32(length), key, np.float32(temperature),
            np.int32(max_steps),
        )
        return self._runs.run(self._programs[0], mdl_vars, state, np.int32(row), prompts)

    def advance(
        self, mdl_vars: PyTree, state: DecodeState, num_steps: int, until_one_ends: bool,
        taken: set[int],
    ) -> tuple[DecodeState, dict[str, np.ndarray]]:
        """Returns the state after `loop.advance`, and the host's report; donates the state.

        Args:
          taken: the rows to go on with.
        """
        is_taken = np.isin(np.arange(self._num_rows), list(taken))
        state, report = self._runs.run(
            self._programs[1], mdl_vars, state, np.int32(num_steps), np.bool_(until_one_ends),
            is_taken,
        )
        return state, jax.device_get(report)

    def _empty_state(self, mdl_vars: PyTree) -> DecodeState:
        decoder, num_rows, model = self._decoder, self._num_rows, self._module(mdl_vars)
        keys = jax.random.split(jax.random.key(0), num_rows)

        def started() -> DecodeState:
            ids = jnp.zeros((num_rows, self._prompt_length), jnp.int32)
            return start(decoder, model, Prompts(ids, jnp.zeros((num_rows,), jnp.int32), keys))[0]

        shapes = jax.eval_shape(started)
        # Not zeros: the model's own, which says how it splits.
        cache = model.init_cache(num_rows, cache_length(decoder, self._prompt_length))
        rest = dataclasses.replace(shapes, cache=None, keys=None)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        return dataclasses.replace(zeros, cache=cache, keys=keys, done=jnp.ones_like(zeros.done))

    def _insert(
        self, mdl_vars: PyTree, state: DecodeState, row: jax.Array, prompt: Prompts
    ) -> DecodeState:
        model = self._module(mdl_vars)
        new, _ = start(self._decoder, model, jax.tree.map(lambda x: x[None], prompt))
        dims = jax.tree.map(lambda x: 0, dataclasses.replace(state, cache=None))
        dims = dataclasses.replace(dims, cache=batch_dims(model.init_cache))
        return put_row(state, dims, new, row)

    def _advance(
        self, mdl_vars: PyTree, state: DecodeState, num_steps: jax.Array,
        until_one_ends: jax.Array, is_taken: jax.Array,
    ) -> tuple[DecodeState, dict[str, jax.Array]]:
        state = dataclasses.replace(state, done=state.done | ~is_taken)
        model = self._module(mdl_vars)
        state, steps = advance(self._decoder, model, state, num_steps, until_one_ends)
        names = ("done", "decode_lengths", "output_ids", "logprobs")
        return state, {"num_steps": steps} | {name: getattr(state, name) for name in names}
