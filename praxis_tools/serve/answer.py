"""An answer to a request while it comes: generations in the engine, their texts, the time limit."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np

from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.choice_text import LENGTH, ChoiceText, Token
from praxis_tools.serve.engine import Engine, Generation, Piece
from praxis_tools.serve.requests import Request
from praxis_tools.serve.served_model import ServedModel


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of a choice that can be sent.

    Attributes:
      choice: its number, prompt by prompt.
      finish_reason: None: more follows.
    """

    choice: int
    text: str
    tokens: Sequence[Token]
    finish_reason: str | None


class Answer:
    """The choices of a request, in the engine from here on.

    To be made in the event loop that iterates it.

    Args:
      prompts: the ids of each prompt.
      seconds: the most that it may take; what has not ended by then ends so, with "length".

    Attributes:
      created: in Unix seconds.

    Raises:
      ApiError: the engine takes no more.
    """

    def __init__(
        self, request: Request, prompts: Sequence[np.ndarray], model: ServedModel, engine: Engine,
        seconds: float,
    ):
        self.request, self.created = request, int(time.time())
        self.id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._engine, self._seconds = engine, seconds
        self._num_prompt_tokens = sum(map(len, prompts))
        loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()
        seed = secrets.randbits(32) if request.seed is None else request.seed % 2**32
        is_drawn = request.seed is None
        self._ends_at, self._generations, self._texts = loop.time() + seconds, [], []
        for prompt in prompts:
            for sample in range(request.n):
                choice = len(self._generations)
                # With its own seed a prompt gets the same answers as alone.
                draw = choice if is_drawn else sample
                self._generations.append(Generation(
                    prompt, model.most_new(len(prompt), request), request.temperature,
                    request.top_p, request.top_k, seed, draw, request.num_logprobs or 0,
                    self._deliverer(loop, choice),
                ))
                self._texts.append(ChoiceText(
                    model.tokenizer, prompt, request.stop, model.eos_ids,
                    request.num_logprobs is not None,
                ))
        engine.submit(self._generations)

    @property
    def num_choices(self) -> int:
        """How many choices it has: prompts times n."""
        return len(self._texts)

    @property
    def usage(self) -> dict[str, int]:
        """The tokens read and made, as in OpenAI's API."""
        num_new = sum(text.num_tokens for text in self._texts)
        return {
            "prompt_tokens": self._num_prompt_tokens, "completion_tokens": num_new,
            "total_tokens": self._num_prompt_tokens + num_new,
        }

    def cancel(self) -> None:
        """Frees what has not ended."""
        self._engine.cancel([
            generation for generation, text in zip(self._generations, self._texts, strict=True)
            if text.finish_reason is None
        ])

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yields pieces of the choices as they come, until each has ended.

        Raises:
          ApiError: the time is up before the first token, or the server ends.
        """
        has_begun, num_left = False, len(self._texts)
        while num_left:
            try:
                async with asyncio.timeout_at(self._ends_at):
                    choice, piece = await self._pieces.get()
            except TimeoutError:
                if not has_begun:
                    raise ApiError(
                        504, f"No row was free within the {self._seconds:g} s that a request may "
                        "take. Try again later.", code="timeout",
                    ) from None
                self.cancel()
                for choice, text in enumerate(self._texts):
                    if text.finish_reason is None:
                        text.end(LENGTH)
                        yield self._delta(choice)
                return
            has_begun, text = True, self._texts[choice]
            if text.finish_reason is not None:  # Made before the engine heard of its end.
                continue
            if piece.error is not None:
                raise piece.error
            text.add(piece)
            delta = self._delta(choice)
            if text.finish_reason is not None:
                num_left -= 1
                if not piece.done:
                    self._engine.cancel([self._generations[choice]])
            if delta.text or delta.tokens or delta.finish_reason:
                yield delta

    def _delta(self, choice: int) -> Delta:
        text = self._texts[choice]
        return Delta(choice, *text.take(), text.finish_reason)

    def _deliverer(self, loop: asyncio.AbstractEventLoop, choice: int):
        def deliver(piece: Piece) -> None:
            # The loop has ended if the server was not let to drain.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._pieces.put_nowait, (choice, piece))

        return deliver
