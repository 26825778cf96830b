"""Rows of a continuous batch: prompts that enter, are decoded together, and leave by themselves."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

if TYPE_CHECKING:
    from praxis_lite.decode.continuous_batching import ContinuousBatching

# P longest prompt, N likeliest tokens.
PyTree = Any


class Prompt(NamedTuple):
    """A prompt that waits for a row. A field of None is the decoder's."""

    ids: np.ndarray  # int32 [P], padded on the right.
    length: int  # Without padding.
    key: jax.Array  # The sample's, of `loop.sample_keys`.
    temperature: float | None = None
    per_example_max_decode_steps: int | None = None
    top_k: int | None = None  # For a `SampleByRow`, as top_p.
    top_p: float | None = None
    wants_likeliest: bool = False


class NewTokens(NamedTuple):
    """New tokens of a prompt since the last time."""

    index: int  # Of the prompt, in the order in which they were taken.
    ids: np.ndarray  # int32 [n]; n may be 0 at the end.
    logprobs: np.ndarray  # float32 [n].
    done: bool  # The prompt has ended.
    # The N likeliest tokens of each step, [n, N] each, if the prompt wants them.
    likeliest_ids: np.ndarray | None = None
    likeliest_logprobs: np.ndarray | None = None


class Rows:
    """Prompts that are decoded together: each enters a free row, and leaves it at its end.

    A prompt may enter between any two calls of `advance`; num_steps bounds how long it waits.

    Attributes:
      num_steps: model steps so far, each of them for all rows.
      num_prefills: prompts so far.
    """

    def __init__(self, batching: "ContinuousBatching", mdl_vars: PyTree):
        self._batching, self._mdl_vars = batching, mdl_vars
        self._state = batching.empty(mdl_vars)
        self._taken: dict[int, tuple[int, int]] = {}  # By row: its prompt's index and tokens seen.
        self.num_steps = self.num_prefills = 0

    @property
    def num_taken(self) -> int:
        """The rows that have a prompt."""
        return len(self._taken)

    @property
    def num_free(self) -> int:
        """The rows that have none."""
        return self._batching.num_rows - len(self._taken)

    def submit(self, prompt: Prompt) -> int:
        """Puts a prompt into a free row; returns its index, counted from 0."""
        row = next(row for row in range(self._batching.num_rows) if row not in self._taken)
        self._state = self._batching.insert(self._mdl_vars, self._state, row, prompt)
        self._taken[row] = (self.num_prefills, 0)
        self.num_prefills += 1
        return self.num_prefills - 1

    def cancel(self, index: int) -> None:
        """Frees the row of a prompt, if it is in a row still."""
        self._taken = {row: taken for row, taken in self._taken.items() if taken[0] != index}

    def advance(self, num_steps: int, *, until_one_ends: bool = False) -> list[NewTokens]:
        """Makes at most so many steps; returns new tokens, and the prompts that have ended.

        Args:
          num_steps: no more than the decoder's num_kept_steps, if it keeps the likeliest tokens.
          until_one_ends: True: stops as soon as a row is free.
        """
        self._state, report = self._batching.advance(
            self._mdl_vars, self._state, num_steps, until_one_ends, set(self._taken)
        )
        self.num_steps += int(report["num_steps"])
        result = []
        for row, (index, seen) in list(self._taken.items()):
            length, done = int(report["decode_lengths"][row]), bool(report["done"][row])
            if done:
                del self._taken[row]
            else:
                self._taken[row] = (index, length)
            if done or length > seen:
                result.append(_new_tokens(report, row, index, seen, length))
        return result


def _new_tokens(
    report: dict[str, Any], row: int, index: int, seen: int, length: int
) -> NewTokens:
    new, kept = slice(seen, length), report["likeliest"]
    likeliest = ()
    if kept is not None and kept.is_wanted[row]:
        places = np.arange(seen, length) % kept.ids.shape[1]
        assert len(places) <= kept.ids.shape[1], "more steps than are kept"
        likeliest = (kept.ids[row, places], kept.logprobs[row, places])
    return NewTokens(
        index, report["output_ids"][row, new], report["logprobs"][row, new],
        bool(report["done"][row]), *likeliest,
    )
