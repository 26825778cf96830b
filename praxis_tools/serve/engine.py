"""The engine, which decodes requests with continuous batching.

A request waits in a queue until a row of the batch is free. Meanwhile, decoding continues in the
other rows.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.decode.continuous_batching import ContinuousBatching
from praxis_lite.decode.rows import NewTokens, Prompt, Rows
from praxis_tools.serve.api_error import ApiError

# Maximum number of decoding steps between two checks of the queue for new requests.
STEPS_BETWEEN_CHECKS = 4
RETRY_SECONDS = 1  # Retry-After header if the queue is full.
# Tokens with their log-probs, most likely first.
Likeliest = Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of a generation.

    Attributes:
      ids: The new tokens.
      logprobs: Log-prob of each token.
      likeliest: The most likely tokens at each position, if requested.
      done: Whether this is the last piece.
      error: Error that ended the generation, or None.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    likeliest: Sequence[Likeliest] = ()
    done: bool = False
    error: ApiError | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """A single answer to a prompt.

    Attributes:
      ids: Token ids of the prompt.
      max_tokens: Maximum number of new tokens.
      temperature: Sampling temperature.
      top_p: Probability mass for nucleus sampling.
      top_k: Number of most likely tokens to sample from, or 0 for all tokens.
      seed: Seed for sampling. The random key is `fold_in(key(seed), choice)`, as in
        `Decoder.__call__`.
      choice: Number that distinguishes answers with the same seed.
      num_likeliest: Number of most likely tokens to deliver with each token.
      deliver: Function that is called with each piece, in the engine's thread.
    """

    ids: np.ndarray
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int
    num_likeliest: int
    deliver: Callable[[Piece], None]


class Engine:
    """Decodes generations in the rows of a continuous batch.

    Call `run` in the thread that owns the devices. All other methods may be called from any thread.

    Args:
      batching: Compiled functions that decode the rows with SampleByRow.
      mdl_vars: Model variables, as `batching` expects them.
      prompt_lengths: Lengths to which prompts are padded.
      max_waiting: Maximum number of generations in the queue.

    Attributes:
      num_tokens: Number of tokens generated so far.
      num_prompts: Number of prompts processed so far.
    """

    def __init__(
        self,
        batching: ContinuousBatching,
        mdl_vars: Any,
        prompt_lengths: Sequence[int],
        max_waiting: int,
    ):
        self._batching, self._mdl_vars = batching, mdl_vars
        self._prompt_lengths, self.max_waiting = sorted(prompt_lengths), max_waiting
        self._changed = threading.Condition()
        self._waiting: collections.deque[Generation] = collections.deque()
        self._in_rows: dict[int, Generation] = {}
        self._cancelled: set[Generation] = set()
        # Time at which draining ends, in seconds of time.monotonic; None if the engine is not
        # draining.
        self._deadline: float | None = None
        self._rows: Rows | None = None
        self.num_tokens = self.num_prompts = 0

    @property
    def num_rows(self) -> int:
        return self._batching.num_rows

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_rows(self) -> int:
        return len(self._in_rows)

    @property
    def is_draining(self) -> bool:
        return self._deadline is not None

    def warm_up(self) -> None:
        """Compiles all functions that decoding needs.

        Raises:
          OutOfMemory: The rows do not fit in memory.
        """
        rows = self._batching.rows(self._mdl_vars)
        example = Generation(np.zeros(1, np.int32), 1, 1.0, 0.5, 1, 0, 0, 1, print)
        rows.warm_up(self._prompt(example).key)
        self._rows = rows

    def submit(self, generations: Sequence[Generation]) -> None:
        """Adds either all or none of the generations to the queue.

        Raises:
          ApiError: The queue is full, or the engine is draining.
        """
        with self._changed:
            if self.is_draining:
                raise ApiError(503, "The server is shutting down.", code="draining")
            num_free = self.num_rows - len(self._in_rows)
            room = self.max_waiting + num_free - len(self._waiting)
            if len(generations) > room:
                raise ApiError(
                    429,
                    f"The queue is full: {len(self._waiting)} answers are waiting, the limit "
                    f"is {self.max_waiting}, and this request needs {len(generations)}. Try "
                    "again later.",
                    code="queue_full",
                    headers={"Retry-After": str(RETRY_SECONDS)},
                )
            self._waiting.extend(generations)
            self._changed.notify()

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Cancels generations in rows or in the queue, ignoring finished generations."""
        with self._changed:
            for generation in generations:
                if generation in self._waiting:
                    self._waiting.remove(generation)
                else:
                    self._cancelled.add(generation)
            self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Makes `run` return as soon as all generations have finished, or after `seconds`."""
        with self._changed:
            if not self.is_draining:
                self._deadline = time.monotonic() + seconds
            self._changed.notify()

    def run(self) -> None:
        """Decodes until the engine is drained.

        Every generation receives a last piece, even if decoding raises an error.
        """
        error = ApiError(500, "The server failed. Its output shows the reason.", code="failed")
        try:
            while self._wait_for_work():
                self._decode_steps()
            error = ApiError(
                503, "The server shut down before the answer was complete.", code="draining"
            )
        finally:
            with self._changed:
                self._deadline = self._deadline or time.monotonic()
                unfinished = [*self._in_rows.values(), *self._waiting]
                self._in_rows.clear()
                self._waiting.clear()
            for generation in unfinished:
                generation.deliver(Piece(done=True, error=error))

    def _wait_for_work(self) -> bool:
        """Waits for work; returns False if the engine is draining and should stop."""
        with self._changed:
            while not self._waiting and not self._in_rows and not self.is_draining:
                self._changed.wait()
            if self._deadline is None:
                return True
            has_work = bool(self._waiting or self._in_rows)
            return has_work and time.monotonic() < self._deadline

    def _decode_steps(self) -> None:
        """Frees the rows of cancelled generations, admits waiting generations and decodes."""
        rows = self._rows
        assert rows is not None, "call warm_up first"
        with self._changed:
            for index, generation in list(self._in_rows.items()):
                if generation in self._cancelled:
                    del self._in_rows[index]
                    rows.cancel(index)
            self._cancelled.clear()
            admitted = [
                self._waiting.popleft() for _ in range(min(rows.num_free, len(self._waiting)))
            ]
        for generation in admitted:
            index = rows.submit(self._prompt(generation))
            self.num_prompts += 1
            with self._changed:
                self._in_rows[index] = generation
        if not self._in_rows:
            return
        # If requests are waiting, stop as soon as a row is free.
        for new in rows.advance(STEPS_BETWEEN_CHECKS, until_one_ends=bool(self._waiting)):
            generation = self._in_rows[new.index]
            self.num_tokens += len(new.ids)
            if new.done:
                with self._changed:
                    del self._in_rows[new.index]
            generation.deliver(_piece(new, generation.num_likeliest))

    def _prompt(self, generation: Generation) -> Prompt:
        length = len(generation.ids)
        padded = next(size for size in self._prompt_lengths if size >= length)
        key = jax.random.fold_in(jax.random.key(generation.seed), generation.choice)
        return Prompt(
            np.pad(generation.ids, (0, padded - length)),
            length,
            key,
            generation.temperature,
            generation.max_tokens,
            generation.top_k,
            generation.top_p,
            wants_likeliest=generation.num_likeliest > 0,
        )


def _piece(new: NewTokens, num_likeliest: int) -> Piece:
    likeliest: list[Likeliest] = []
    if num_likeliest and new.likeliest_ids is not None and new.likeliest_logprobs is not None:
        pairs = zip(new.likeliest_ids.tolist(), new.likeliest_logprobs.tolist(), strict=True)
        likeliest = [
            list(zip(ids, logprobs, strict=True))[:num_likeliest] for ids, logprobs in pairs
        ]
    return Piece(new.ids.tolist(), new.logprobs.tolist(), likeliest, new.done)
