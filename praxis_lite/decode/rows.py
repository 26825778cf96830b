"""Rows of a continuous batch: prompts enter, are decoded together, and leave separately."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from praxis_lite.core.errors import require

if TYPE_CHECKING:
    from praxis_lite.decode.continuous_batching import ContinuousBatching

__all__ = ("NewTokens", "Prompt", "Rows")

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

    A prompt may enter between any two calls of `advance`; num_steps bounds how long it waits. Those
    that enter at once go through the model together, if they have one length.

    Attributes:
      num_steps: model steps so far, each of them for all rows.
      num_prefills: prompts so far.
      num_passes: how often the model has read prompts.
      num_prompt_tokens, num_read_tokens: of these prompts, and how many of them the model has read:
        not those of a shared prefix.
      num_row_tokens, num_row_steps: new tokens of the prompts that have ended, and with speculation
        the model steps that gave them.
    """

    def __init__(self, batching: "ContinuousBatching", mdl_vars: PyTree):
        self._batching, self._mdl_vars = batching, mdl_vars
        self._state = batching.empty(mdl_vars)
        self._taken: dict[int, tuple[int, int]] = {}  # By row: its prompt's index and tokens seen.
        self._entering: dict[int, Prompt] = {}  # By row, up to the next steps.
        self._begin()

    def _begin(self) -> None:
        self._prefixes = self._batching.prefix_cache(self._mdl_vars)
        self.num_steps = self.num_prefills = self.num_passes = 0
        self.num_prompt_tokens = self.num_read_tokens = 0
        self.num_row_tokens = self.num_row_steps = 0

    def warm_up(self, key: jax.Array) -> None:
        """Compiles all programs; before the first prompt. Of `key` only the kind matters."""
        for length in self._batching.prompt_lengths:
            ids = np.zeros(length, np.int32)
            prompt = Prompt(ids, length, key, per_example_max_decode_steps=0)
            # Once more, because a prefix is read for the second prompt that has it.
            for size in (*self._batching.sizes(length), 1):
                self._insert(dict.fromkeys(range(size), prompt))
        self.advance(1)
        self._begin()

    @property
    def num_taken(self) -> int:
        """The rows that have a prompt."""
        return len(self._taken)

    @property
    def num_free(self) -> int:
        """The rows that have none."""
        return self._batching.num_rows - len(self._taken)

    def submit(self, prompt: Prompt) -> int:
        """Puts a prompt into a free row; returns its index, counted from 0.

        Raises:
          ConfigError: it is not padded to one of the batch's `prompt_lengths`.
        """
        shape = np.shape(prompt.ids)
        expected = [(length,) for length in self._batching.prompt_lengths]
        require(
            shape in expected, "The shape of a prompt's ids", shape,
            " or ".join(map(str, expected)), "Pad it.",
        )
        row = next(row for row in range(self._batching.num_rows) if row not in self._taken)
        self._entering[row] = prompt
        self._taken[row] = (self.num_prefills, 0)
        self.num_prefills += 1
        return self.num_prefills - 1

    def summary(self, what: str) -> str:
        """Returns a line: how many prompts took how many steps, and how many tokens were saved.

        Args:
          what: The name of the prompts: "rows of prompts".
        """
        line = (
            f"{self.num_prefills} {what} took {self.num_steps} model steps, "
            f"{self._batching.num_rows} rows at a time"
        )
        if self._prefixes is not None:
            line += (
                f"; {self.num_read_tokens} of {self.num_prompt_tokens} tokens of prompts were "
                "read, the others were in shared prefixes"
            )
        if self.num_row_steps:
            line += f"; {self.num_row_tokens / self.num_row_steps:.2f} tokens of a row in a step"
        return line

    def cancel(self, index: int) -> None:
        """Frees the row of a prompt, if it is in a row still."""
        self._taken = {row: taken for row, taken in self._taken.items() if taken[0] != index}
        self._entering = {row: item for row, item in self._entering.items() if row in self._taken}

    def advance(self, num_steps: int, *, until_one_ends: bool = False) -> list[NewTokens]:
        """Makes at most `num_steps` steps; returns new tokens, and the prompts that have ended.

        Args:
          num_steps: no more than the decoder's num_kept_steps, if it keeps the likeliest tokens.
          until_one_ends: True: stops as soon as a row is free.
        """
        for length in sorted({len(prompt.ids) for prompt in self._entering.values()}):
            self._insert({
                row: prompt for row, prompt in self._entering.items() if len(prompt.ids) == length
            })
        self._entering.clear()
        self._state, report = self._batching.advance(
            self._mdl_vars, self._state, num_steps, until_one_ends, set(self._taken)
        )
        self.num_steps += int(report["num_steps"])
        result = []
        for row, (index, seen) in list(self._taken.items()):
            length, done = int(report["decode_lengths"][row]), bool(report["done"][row])
            if done:
                del self._taken[row]
                if report["num_model_steps"] is not None:
                    self.num_row_tokens += length
                    self.num_row_steps += int(report["num_model_steps"][row])
            else:
                self._taken[row] = (index, length)
            if done or length > seen:
                result.append(_new_tokens(report, row, index, seen, length))
        return result

    def _insert(self, prompts: Mapping[int, Prompt]) -> None:
        """Puts prompts of equal length into rows, as many at a time as `sizes` allows."""
        rows, length = list(prompts), len(next(iter(prompts.values())).ids)
        while rows:
            size = next(n for n in self._batching.sizes(length) if n <= len(rows))
            now, rows = rows[:size], rows[size:]
            given, prefix = [prompts[row] for row in now], None
            if self._prefixes is not None:
                num_read = self._prefixes.num_read
                prefix = self._prefixes.longest(given[0].ids, int(given[0].length))
                self.num_read_tokens += self._prefixes.num_read - num_read - prefix[1]
            self._state = self._batching.insert(self._mdl_vars, self._state, now, given, prefix)
            self.num_passes += 1
            num_tokens = sum(int(prompt.length) for prompt in given)
            self.num_prompt_tokens += num_tokens
            self.num_read_tokens += num_tokens


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
