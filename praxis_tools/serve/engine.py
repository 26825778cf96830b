"""The engine: requests wait in a queue, enter free rows while others decode, and get tokens."""

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

# Most steps between two looks at the queue: so long a newcomer waits for a free row.
STEPS_BETWEEN_LOOKS = 4
RETRY_SECONDS = 1  # Sent to a client that finds the queue full.
# Tokens with their log-probs, the likeliest first.
Likeliest = Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of a generation.

    Attributes:
      likeliest: For each token the likeliest ones in its place, if they were asked for.
      done: nothing follows.
      error: why it has ended before its time; None: it has not.
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
      ids: of the prompt.
      seed, choice: the key is that of the seed, with this number folded in, as in
        `Decoder.__call__` with the key of the seed. No two answers to a request without a seed
        have the same number, whatever their prompts.
      num_likeliest: Likeliest tokens to deliver with each token.
      deliver: takes each piece, in the engine's thread.
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
    """Decodes generations in the rows of a continuous batch, as they come.

    `run` is called in the thread that owns the devices; the other methods in any.

    Args:
      batching: of a SampleByRow.
      mdl_vars: as its programs take them.
      prompt_lengths: to which prompts are padded, upwards.
      most_waiting: Generations in addition to those in rows.

    Attributes:
      num_tokens, num_prompts: made and read so far.
    """

    def __init__(
        self, batching: ContinuousBatching, mdl_vars: Any, prompt_lengths: Sequence[int],
        most_waiting: int,
    ):
        self._batching, self._mdl_vars = batching, mdl_vars
        self._prompt_lengths, self.most_waiting = sorted(prompt_lengths), most_waiting
        self._changed = threading.Condition()
        self._waiting: collections.deque[Generation] = collections.deque()
        self._in_rows: dict[int, Generation] = {}
        self._cancelled: set[Generation] = set()
        self._ends_at: float | None = None  # Of time.monotonic, once it drains.
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
        return self._ends_at is not None

    def warm_up(self) -> None:
        """Compiles all programs.

        Raises:
          OutOfMemory: this host cannot hold the rows.
        """
        rows = self._batching.rows(self._mdl_vars)
        warm = Generation(np.zeros(1, np.int32), 1, 1.0, 0.5, 1, 0, 0, 1, print)
        rows.warm_up(self._prompt(warm).key)
        self._rows = rows

    def submit(self, generations: Sequence[Generation]) -> None:
        """Puts generations into the queue, all or none.

        Raises:
          ApiError: the queue is full, or the engine is about to end.
        """
        with self._changed:
            if self.is_draining:
                raise ApiError(503, "The server is about to end. Ask another one.", code="draining")
            num_free = self.num_rows - len(self._in_rows)
            room = self.most_waiting + num_free - len(self._waiting)
            if len(generations) > room:
                raise ApiError(
                    429, f"The queue is full: {len(self._waiting)} answers wait, and at most "
                    f"{self.most_waiting} may; this request wants {len(generations)}. Try again "
                    "later.",
                    code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)},
                )
            self._waiting.extend(generations)
            self._changed.notify()

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Ends generations, in rows or in the queue; ignores those that have ended."""
        with self._changed:
            for generation in generations:
                if generation in self._waiting:
                    self._waiting.remove(generation)
                else:
                    self._cancelled.add(generation)
            self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Makes `run` return once all generations have ended, or after `seconds`."""
        with self._changed:
            if not self.is_draining:
                self._ends_at = time.monotonic() + seconds
            self._changed.notify()

    def run(self) -> None:
        """Decodes until it is drained; in any case each generation gets its last piece."""
        error = ApiError(500, "The server has failed. Its output shows why.", code="failed")
        try:
            while self._goes_on():
                self._turn()
            error = ApiError(503, "The server has ended before the answer.", code="draining")
        finally:
            with self._changed:
                self._ends_at = self._ends_at or time.monotonic()
                left = [*self._in_rows.values(), *self._waiting]
                self._in_rows.clear()
                self._waiting.clear()
            for generation in left:
                generation.deliver(Piece(done=True, error=error))

    def _goes_on(self) -> bool:
        """Waits for work; returns False once there is none and none will come."""
        with self._changed:
            while not self._waiting and not self._in_rows and not self.is_draining:
                self._changed.wait()
            if not self.is_draining:
                return True
            has_work = bool(self._waiting or self._in_rows)
            return has_work and time.monotonic() < self._ends_at

    def _turn(self) -> None:
        """Frees the rows of cancelled generations, admits waiting ones, and makes a few steps."""
        rows = self._rows
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
        for new in rows.advance(STEPS_BETWEEN_LOOKS, until_one_ends=bool(self._waiting)):
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
            np.pad(generation.ids, (0, padded - length)), length, key, generation.temperature,
            generation.max_tokens, generation.top_k, generation.top_p,
            wants_likeliest=generation.num_likeliest > 0,
        )


def _piece(new: NewTokens, num_likeliest: int) -> Piece:
    likeliest = []
    if num_likeliest:
        pairs = zip(new.likeliest_ids.tolist(), new.likeliest_logprobs.tolist(), strict=True)
        likeliest = [
            list(zip(ids, logprobs, strict=True))[:num_likeliest] for ids, logprobs in pairs
        ]
    return Piece(new.ids.tolist(), new.logprobs.tolist(), likeliest, new.done)
