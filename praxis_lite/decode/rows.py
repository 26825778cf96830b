"""The rows of a continuous batch, which prompts enter and leave independently."""

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
    """A prompt and its settings. If a setting is None, the decoder's setting is used.

    Attributes:
      ids: int32 [P], padded on the right.
      length: Length without padding.
      key: Random key of the sample, from `loop.sample_keys`.
      temperature: Temperature, if the decoder samples.
      per_example_max_decode_steps: A limit on new tokens, in addition to the decoder's
        max_decode_steps.
      top_k: Used only by `SampleByRow`.
      top_p: Used only by `SampleByRow`.
      wants_likeliest: Whether to return the likeliest tokens at each step.
    """

    ids: np.ndarray
    length: int
    key: jax.Array
    temperature: float | None = None
    per_example_max_decode_steps: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    wants_likeliest: bool = False


class NewTokens(NamedTuple):
    """Tokens generated for a prompt since the last report.

    Attributes:
      index: Index of the prompt in the order of submission.
      ids: int32 [n]; n may be 0 when the prompt ends.
      logprobs: float32 [n].
      done: Whether the prompt has ended.
      likeliest_ids: int32 [n, N], the N likeliest tokens at each step; None unless the prompt
        requests them.
      likeliest_logprobs: float32 [n, N], the log-probs of `likeliest_ids`.
    """

    index: int  # type: ignore[assignment]  # Hides tuple.index, which this class does not need.
    ids: np.ndarray
    logprobs: np.ndarray
    done: bool
    likeliest_ids: np.ndarray | None = None
    likeliest_logprobs: np.ndarray | None = None


class Rows:
    """A fixed number of rows that are decoded together; each row is free or contains a prompt.

    New prompts can only enter between two calls of `advance`, so the argument num_steps of
    `advance` limits how long a prompt waits for a free row. Prompts of the same length that are
    submitted between the same two calls are prefilled together.

    Attributes:
      num_steps: Number of model steps so far, each of which advances all rows.
      num_prefills: Number of prompts that have been prefilled so far.
      num_passes: Number of model calls for prefill.
      num_prompt_tokens: Total number of tokens in these prompts.
      num_read_tokens: Number of prompt tokens that the model has read. Shared prefixes are counted
        once.
      num_row_tokens: Number of new tokens for prompts that have ended; 0 without speculation.
      num_row_steps: Number of model steps that computed these tokens.
    """

    def __init__(self, batching: "ContinuousBatching", mdl_vars: PyTree):
        self._batching, self._mdl_vars = batching, mdl_vars
        self._state = batching.empty(mdl_vars)
        # Maps a row to the index of its prompt and to the number of tokens reported so far.
        self._taken: dict[int, tuple[int, int]] = {}
        self._entering: dict[int, Prompt] = {}  # Submitted prompts to prefill, keyed by row.
        self._reset()

    def _reset(self) -> None:
        self._prefixes = self._batching.prefix_cache(self._mdl_vars)
        self.num_steps = self.num_prefills = self.num_passes = 0
        self.num_prompt_tokens = self.num_read_tokens = 0
        self.num_row_tokens = self.num_row_steps = 0

    def warm_up(self, key: jax.Array) -> None:
        """Compiles all functions before the first prompt; only the dtype of `key` matters."""
        for length in self._batching.prompt_lengths:
            ids = np.zeros(length, np.int32)
            prompt = Prompt(ids, length, key, per_example_max_decode_steps=0)
            # Insert one more prompt, because a shared prefix is read when a second prompt begins
            # with it.
            for size in (*self._batching.sizes(length), 1):
                self._insert(dict.fromkeys(range(size), prompt))
        self.advance(1)
        self._reset()

    @property
    def num_taken(self) -> int:
        """The number of rows with a prompt."""
        return len(self._taken)

    @property
    def num_free(self) -> int:
        """The number of rows without a prompt."""
        return self._batching.num_rows - len(self._taken)

    def submit(self, prompt: Prompt) -> int:
        """Assigns a prompt to a free row, and returns the prompt's index.

        Raises:
          ConfigError: The prompt is not padded to one of the batch's `prompt_lengths`.
        """
        shape = np.shape(prompt.ids)
        expected = [(length,) for length in self._batching.prompt_lengths]
        require(
            shape in expected,
            "The shape of a prompt's ids",
            shape,
            " or ".join(map(str, expected)),
            "Pad the ids.",
        )
        row = next(row for row in range(self._batching.num_rows) if row not in self._taken)
        self._entering[row] = prompt
        self._taken[row] = (self.num_prefills, 0)
        self.num_prefills += 1
        return self.num_prefills - 1

    def summary(self, prompts: str) -> str:
        """Returns a log line with the numbers of prompts, steps and tokens.

        Args:
          prompts: Description of the prompts, such as "rows of prompts".
        """
        line = (
            f"{self.num_prefills} {prompts} took {self.num_steps} model steps, "
            f"{self._batching.num_rows} rows at a time"
        )
        if self._prefixes is not None:
            line += (
                f"; {self.num_read_tokens} of {self.num_prompt_tokens} prompt tokens were read, "
                "the others were in shared prefixes"
            )
        if self.num_row_steps:
            line += f"; {self.num_row_tokens / self.num_row_steps:.2f} tokens per row and step"
        return line

    def cancel(self, index: int) -> None:
        """Frees a prompt's row unless the prompt has ended."""
        self._taken = {row: taken for row, taken in self._taken.items() if taken[0] != index}
        self._entering = {
            row: prompt for row, prompt in self._entering.items() if row in self._taken
        }

    def advance(self, num_steps: int, *, until_one_ends: bool = False) -> list[NewTokens]:
        """Prefills submitted prompts, runs up to `num_steps` steps, and returns the new tokens.

        Args:
          num_steps: Maximum number of steps; at most num_kept_steps if the decoder stores the
            likeliest tokens.
          until_one_ends: Whether to stop as soon as any active prompt ends.

        Returns:
          The new tokens for each prompt that has new tokens or has ended.
        """
        # Prompts of the same length are prefilled together.
        for length in sorted({len(prompt.ids) for prompt in self._entering.values()}):
            self._insert(
                {row: prompt for row, prompt in self._entering.items() if len(prompt.ids) == length}
            )
        self._entering.clear()
        self._state, report = self._batching.advance(
            self._mdl_vars, self._state, num_steps, until_one_ends, set(self._taken)
        )
        self.num_steps += int(report["num_steps"])
        new_tokens = []
        # A taken row belongs to prompt `index`, of whose continuation `seen` tokens have been
        # reported.
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
                new_tokens.append(_new_tokens(report, row, index, seen, length))
        return new_tokens

    def _insert(self, prompts: Mapping[int, Prompt]) -> None:
        """Prefills prompts of the same length into rows, in groups whose sizes are in `sizes`."""
        rows, length = list(prompts), len(next(iter(prompts.values())).ids)
        while rows:
            size = next(n for n in self._batching.sizes(length) if n <= len(rows))
            group, rows = rows[:size], rows[size:]
            new_prompts, prefix = [prompts[row] for row in group], None
            if self._prefixes is not None:
                num_read = self._prefixes.num_read
                prefix = self._prefixes.longest(new_prompts[0].ids, int(new_prompts[0].length))
                # Tokens of the prefix count only if the cache did not contain them.
                self.num_read_tokens += self._prefixes.num_read - num_read - prefix[1]
            self._state = self._batching.insert(
                self._mdl_vars, self._state, group, new_prompts, prefix
            )
            self.num_passes += 1
            num_tokens = sum(int(prompt.length) for prompt in new_prompts)
            self.num_prompt_tokens += num_tokens
            self.num_read_tokens += num_tokens


def _new_tokens(report: dict[str, Any], row: int, index: int, seen: int, length: int) -> NewTokens:
    new, stored = slice(seen, length), report["likeliest"]
    likeliest: tuple[np.ndarray, ...] = ()
    if stored is not None and stored.is_wanted[row]:
        # The likeliest tokens are stored in a ring buffer.
        slots = np.arange(seen, length) % stored.ids.shape[1]
        assert len(slots) <= stored.ids.shape[1], "more steps than the ring buffer has slots"
        likeliest = (stored.ids[row, slots], stored.logprobs[row, slots])
    return NewTokens(
        index,
        report["output_ids"][row, new],
        report["logprobs"][row, new],
        bool(report["done"][row]),
        *likeliest,
    )
