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
from praxis_lite.decode.prefill import cache_length
from praxis_lite.decode.prefix_sharing import Beginnings, OneRow, prefill_after
from praxis_lite.decode.rows import NewTokens, Prompt, Rows
from praxis_lite.decode.sampling import Greedy
from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.host.host_memory import FirstRuns

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
    would get alone. Between calls each array of the state stays split as the model splits it, if
    that is even, and is whole on every device otherwise: choose num_rows so that the devices of the
    batch divide it.

    Args:
      decoder: Greedy or Sample; each sample of a prompt is a Prompt of its own.
      module: from mdl_vars to the model, inside a compiled program.
      num_rows: R.
      prompt_length: P, or several lengths to which prompts may be padded. Their caches must be of
        one length, which decoder.seqlen can say.
      wrap: makes of `function(mdl_vars, ...)` one that jit compiles: the partitioner's
        `with_mdl_vars`, which knows how mdl_vars are stored and the mesh, with `has_splits`.
      compiler_options: the partitioner's `decode_options`.
      advice: for a lack of memory, in whole sentences.

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
                "has a step of its own. Use Greedy or Sample."
            )
        lengths = (prompt_length,) if isinstance(prompt_length, int) else tuple(prompt_length)
        of_caches = {cache_length(decoder, length) for length in lengths}
        require(
            len(of_caches) == 1, "The lengths of the caches of ContinuousBatching",
            sorted(of_caches), "one length", "Set decoder.seqlen to it, and more max_decode_steps.",
        )
        self._decoder, self._module = decoder, module
        self.num_rows, self.prompt_lengths = num_rows, lengths
        # Takes the weights although it reads none, so as to run on their devices.
        self._empty = jax.jit(wrap(self._empty_state), keep_unused=True)
        self._wrap, self._compiler_options = wrap, compiler_options
        self._programs: tuple[Program, Program] | None = None
        self._runs = FirstRuns(f"Decoding {num_rows} rows at a time", advice)
        self.latest: Rows | None = None
        # Of beginnings that prompts have in common.
        self._one_row = (
            OneRow(decoder, module, max(lengths), wrap, compiler_options, self._runs.run)
            if decoder.num_cached_prefixes else None
        )

    def stream(
        self,
        mdl_vars: PyTree,
        prompts: Iterable[Prompt],
        *,
        num_steps: int | None = None,
        text_of: Callable[[Prompt], ContinuationText] | None = None,
    ) -> Iterator[NewTokens]:
        """Yields new tokens as they come, of whichever prompts are in a row.

        Args:
          prompts: taken one by one, each when a row is free for it.
          num_steps: most steps between two looks at the tokens; None: until one row ends.
          text_of: Makes the text of a prompt's continuation, whose stop string ends it at the
            next look, whichever tokens spell it.
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

    @property
    def shares_beginnings(self) -> bool:
        """True if what prompts begin with in common is read once."""
        return self._one_row is not None

    def beginnings(self, mdl_vars: PyTree) -> Beginnings | None:
        """Returns the keeper of beginnings of prompts, or None if the decoder shares none."""
        if self._one_row is None:
            return None
        return self._one_row.beginnings(mdl_vars, self._decoder.num_cached_prefixes)

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

        Powers of 4, for each compiles; 1 where beginnings are shared, which differ.
        """
        most = max(1, min(self.num_rows, TOKENS_TOGETHER // prompt_length))
        powers = [4**n for n in range(most.bit_length()) if 4**n <= most]
        return [1] if self.shares_beginnings else powers[::-1]

    def check_prompt(self, prompt: Prompt) -> None:
        """Checks that a prompt's padded length is in `prompt_lengths`.

        Raises:
          ConfigError: it is not.
        """
        shape, expected = np.shape(prompt.ids), [(length,) for length in self.prompt_lengths]
        require(
            shape in expected, "The shape of a prompt's ids", shape,
            " or ".join(map(str, expected)), "Pad it.",
        )

    def insert(
        self, mdl_vars: PyTree, state: DecodeState, rows: Sequence[int],
        prompts: Sequence[Prompt], beginning: tuple[PyTree, int] | None = None,
    ) -> DecodeState:
        """Returns the state with prompts of equal length in rows; the state given is donated.

        Args:
          rows: of each prompt.
          prompts: as many as one of `sizes`.
          beginning: of a single prompt: a cache of one row, and how many of its tokens are in it.
        """
        decoder = self._decoder

        def with_settings(prompt: Prompt) -> Prompts:
            def setting(name: str, default: Any, dtype: type) -> Any:
                given = getattr(prompt, name)
                given = default if given is None else given
                return None if given is None else dtype(given)

            return Prompts(
                np.asarray(prompt.ids, np.int32), np.int32(prompt.length), prompt.key,
                setting("temperature", decoder.temperature, np.float32),
                setting("per_example_max_decode_steps", decoder.max_decode_steps, np.int32),
                setting("top_k", decoder.top_k, np.int32),
                setting("top_p", decoder.top_p, np.float32),
                np.bool_(prompt.wants_likeliest),
            )

        if beginning is not None:
            beginning = (beginning[0], np.int32(beginning[1]))
        return self._runs.run(
            self._programs[0], mdl_vars, state, np.asarray(rows, np.int32),
            tuple(map(with_settings, prompts)), beginning,
            key=(len(prompts), np.shape(prompts[0].ids)),
        )

    def advance(
        self, mdl_vars: PyTree, state: DecodeState, num_steps: int, until_one_ends: bool,
        taken: set[int],
    ) -> tuple[DecodeState, dict[str, np.ndarray]]:
        """Returns the state after `loop.advance`, and the host's report; donates the state.

        Args:
          taken: the rows to go on with.
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
        # Not zeros: the model's own, which says how it splits.
        cache = model.init_cache(num_rows, cache_length(decoder, max(self.prompt_lengths)))
        rest = dataclasses.replace(shapes, cache=None, keys=None)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        return dataclasses.replace(zeros, cache=cache, keys=keys, done=jnp.ones_like(zeros.done))

    def _insert(
        self, mdl_vars: PyTree, state: DecodeState, rows: jax.Array, prompts: tuple[Prompts, ...],
        beginning: tuple[PyTree, jax.Array] | None,
    ) -> DecodeState:
        model, prefix = self._module(mdl_vars), None
        prompts = jax.tree.map(lambda *x: jnp.stack(x), *prompts)
        if beginning is not None:
            prefix = prefill_after(self._decoder, model, prompts, *beginning, self._one_row.size)
        new, _ = start(self._decoder, model, prompts, prefix)
        dims = jax.tree.map(lambda x: 0, dataclasses.replace(state, cache=None))
        dims = dataclasses.replace(dims, cache=batch_dims(model.init_cache))
        return put_rows(state, dims, new, rows)

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
