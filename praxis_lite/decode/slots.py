"""Decoding in slots: a row that ends frees its place at once, and the next prompt takes it."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.decode.cache_rows import batch_dims, put_row
from praxis_lite.decode.loop import advance, start
from praxis_lite.decode.prefill import cache_length
from praxis_lite.decode.rows import Rows
from praxis_lite.decode.sampling import Greedy
from praxis_lite.errors import ConfigError

# R slots, P longest prompt, M most new tokens.
PyTree = Any


class Prompt(NamedTuple):
    """What waits for a slot.

    Attributes:
      ids: int32 [P], padded on the right.
      length: its true tokens.
      key: of the row; `loop.sample_keys` has folded the sample's number into the prompt's.
      temperature, per_example_max_decode_steps: None: the decoder's.
    """

    ids: np.ndarray
    length: int
    key: jax.Array
    temperature: float | None = None
    per_example_max_decode_steps: int | None = None


class NewTokens(NamedTuple):
    """What came since the last time, of one prompt.

    Attributes:
      index: of the prompt, in the order in which they were taken.
      ids: int32 [n], n may be 0 at the end.
      logprobs: float32 [n].
      done: the prompt has ended.
    """

    index: int
    ids: np.ndarray
    logprobs: np.ndarray
    done: bool


class Slots:
    """Decodes any number of prompts in `num_slots` places, by two compiled programs.

    One takes a prompt into a slot, one makes steps; the state, caches included, is donated from
    call to call. A prompt's tokens are those that it would get alone. Between calls each array of
    the state stays split as the model splits it, where that is even, and is else whole on every
    device: choose num_slots so that the devices of the batch divide it.

    Args:
      decoder: Greedy or Sample; each sample of a prompt is a Prompt of its own.
      module: from mdl_vars to the model, inside a compiled program.
      num_slots: R.
      prompt_length: P.
      wrap: makes of `function(mdl_vars, ...)` one that jit compiles: the partitioner's
        `with_mdl_vars`, which knows how mdl_vars are stored and the mesh.

    Attributes:
      num_steps: model steps that the latest stream has made, each of them for all slots.
      num_prefills: prompts that it has taken.
    """

    def __init__(
        self,
        decoder: Greedy,
        module: Callable[[PyTree], Any],
        num_slots: int,
        prompt_length: int,
        *,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ):
        if not isinstance(decoder, Greedy):
            raise ConfigError(
                f"{type(decoder).__name__} cannot decode in slots, where every row has a step of "
                "its own. Use Greedy or Sample."
            )
        self._decoder, self._module = decoder, module
        self._num_slots, self._prompt_length = num_slots, prompt_length
        # Reads no weight, but is to run on the devices that have them.
        self._empty = jax.jit(wrap(self._empty_rows), keep_unused=True)
        self._wrap = wrap
        self._programs: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self.num_steps = self.num_prefills = 0

    def stream(
        self,
        mdl_vars: PyTree,
        prompts: Iterable[Prompt],
        *,
        num_steps: int | None = None,
        should_stop: Callable[[int, np.ndarray], bool] | None = None,
    ) -> Iterator[NewTokens]:
        """Yields new tokens as they come, of whichever prompts are in a slot.

        Args:
          prompts: taken one by one, each when a slot is free for it.
          num_steps: most steps between two looks at the tokens; None: until one row ends.
          should_stop: asked at every look, with a prompt's index and all its new tokens, whether
            it is to end here, such as at a text that no fixed tokens spell.
        """
        self.num_steps = self.num_prefills = 0
        chunk = self._decoder.max_decode_steps if num_steps is None else num_steps
        rows = self._empty(mdl_vars)
        insert, advance_rows = self._compiled(rows)
        # Placed for good, as what the programs return, or the first call would be one apart.
        rows = jax.device_put(rows, jax.tree.map(lambda x: x.sharding, rows))
        waiting = enumerate(prompts)
        upcoming = next(waiting, None)
        in_slots: dict[int, tuple[int, int]] = {}  # Slot to prompt's index and tokens seen.
        while upcoming is not None or in_slots:
            for slot in range(self._num_slots):
                if slot not in in_slots and upcoming is not None:
                    index, prompt = upcoming
                    rows = insert(mdl_vars, rows, *self._inserted(slot, prompt))
                    in_slots[slot] = (index, 0)
                    self.num_prefills += 1
                    upcoming = next(waiting, None)
            is_taken = np.asarray([slot in in_slots for slot in range(self._num_slots)])
            rows, report = advance_rows(
                mdl_vars, rows, np.int32(chunk), np.bool_(upcoming is not None), is_taken
            )
            report = jax.device_get(report)
            self.num_steps += int(report["num_steps"])
            for slot, (index, seen) in list(in_slots.items()):
                length = int(report["decode_lengths"][slot])
                ids, done = report["output_ids"][slot, :length], bool(report["done"][slot])
                if not done and should_stop is not None and length > seen:
                    done = should_stop(index, ids)
                if done:
                    del in_slots[slot]
                else:
                    in_slots[slot] = (index, length)
                if done or length > seen:
                    new = slice(seen, length)
                    yield NewTokens(index, ids[new], report["logprobs"][slot, new], done)

    def _empty_rows(self, mdl_vars: PyTree) -> Rows:
        """Returns slots that are all free."""
        decoder, num_slots, model = self._decoder, self._num_slots, self._module(mdl_vars)
        keys = jax.random.split(jax.random.key(0), num_slots)

        def started() -> Rows:
            ids = jnp.zeros((num_slots, self._prompt_length), jnp.int32)
            return start(decoder, model, ids, jnp.zeros((num_slots,), jnp.int32), keys)[0]

        shapes = jax.eval_shape(started)
        # Not zeros: the model's own, which says how it splits.
        cache = model.init_cache(num_slots, cache_length(decoder, self._prompt_length))
        rest = dataclasses.replace(shapes, cache=None, keys=None)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        return dataclasses.replace(zeros, cache=cache, keys=keys, done=jnp.ones_like(zeros.done))

    def _compiled(self, rows: Rows) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if self._programs is None:
            # The state comes back as it went in, or the next call would be another program.
            shardings = jax.tree.map(lambda x: x.sharding, rows)
            self._programs = (
                jax.jit(self._wrap(self._insert), donate_argnums=1, out_shardings=shardings),
                jax.jit(
                    self._wrap(self._advance), donate_argnums=1, out_shardings=(shardings, None)
                ),
            )
        return self._programs

    def _inserted(self, slot: int, prompt: Prompt) -> tuple[Any, ...]:
        if np.shape(prompt.ids) != (self._prompt_length,):
            raise ConfigError(
                f"A prompt's ids have the shape {np.shape(prompt.ids)}, but the slots were made "
                f"for prompts padded to {self._prompt_length} tokens. Pad it to that."
            )
        decoder, steps = self._decoder, prompt.per_example_max_decode_steps
        temperature = prompt.temperature
        if temperature is None:
            temperature = getattr(decoder, "temperature", 0.0)
        return (
            np.int32(slot),
            np.asarray(prompt.ids, np.int32),
            np.int32(prompt.length),
            prompt.key,
            np.float32(temperature),
            np.int32(decoder.max_decode_steps if steps is None else steps),
        )

    def _insert(
        self, mdl_vars: PyTree, rows: Rows, slot: jax.Array, ids: jax.Array, length: jax.Array,
        key: jax.Array, temperature: jax.Array, max_steps: jax.Array,
    ) -> Rows:
        model = self._module(mdl_vars)
        new, _ = start(
            self._decoder, model, ids[None], length[None], key[None], temperature[None],
            max_steps[None],
        )
        dims = jax.tree.map(lambda x: 0, dataclasses.replace(rows, cache=None))
        dims = dataclasses.replace(dims, cache=batch_dims(model.init_cache))
        return put_row(rows, dims, new, slot)

    def _advance(
        self, mdl_vars: PyTree, rows: Rows, num_steps: jax.Array, until_one_ends: jax.Array,
        is_taken: jax.Array,
    ) -> tuple[Rows, dict[str, jax.Array]]:
        rows = dataclasses.replace(rows, done=rows.done | ~is_taken)
        model = self._module(mdl_vars)
        rows, steps = advance(self._decoder, model, rows, num_steps, until_one_ends)
        report = {
            name: getattr(rows, name)
            for name in ("done", "decode_lengths", "output_ids", "logprobs")
        }
        return rows, {**report, "num_steps": steps}
