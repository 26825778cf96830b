"""Streams the answer to a request, by submitting generations to the engine."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.choice_text import LENGTH, ChoiceText, Token
from praxis_tools.serve.engine import Engine, Generation, Piece
from praxis_tools.serve.requests import Request
from praxis_tools.serve.served_model import ServedModel


@dataclasses.dataclass(frozen=True)
class Delta:
    """New text of a choice that is ready to be sent.

    Attributes:
      choice: Index of the choice, counted across all prompts.
      text: The new text.
      tokens: Tokens whose text is complete, if log-probs were requested.
      finish_reason: "stop" or "length" in the last delta of a choice, otherwise None.
    """

    choice: int
    text: str
    tokens: Sequence[Token]
    finish_reason: str | None


class Answer:
    """The answer to a request, whose generations are submitted to the engine.

    Create the answer in the event loop that iterates over `deltas`.

    Args:
      request: The request.
      prompts: Token ids of each prompt.
      model: The served model.
      engine: Engine that decodes the model.
      seconds: Time limit, after which incomplete choices end with the finish reason "length".

    Attributes:
      request: The request.
      id: Id of the answer.
      created: Time of creation, in Unix seconds.

    Raises:
      ApiError: The engine's queue is full.
    """

    def __init__(
        self,
        request: Request,
        prompts: Sequence[np.ndarray],
        model: ServedModel,
        engine: Engine,
        seconds: float,
    ):
        self.request, self.created = request, int(time.time())
        self.id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._engine, self._seconds = engine, seconds
        self._num_prompt_tokens = sum(map(len, prompts))
        loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()
        seed = secrets.randbits(32) if request.seed is None else request.seed % 2**32
        has_random_seed = request.seed is None
        self._deadline = loop.time() + seconds
        self._generations: list[Generation] = []
        self._texts: list[ChoiceText] = []
        for prompt in prompts:
            for sample in range(request.n):
                choice = len(self._generations)
                # If the client sets the seed, the answers to a prompt must not depend on the other
                # prompts in the request.
                number = choice if has_random_seed else sample
                self._generations.append(
                    Generation(
                        prompt,
                        model.max_new_tokens(len(prompt), request),
                        request.temperature,
                        request.top_p,
                        request.top_k,
                        seed,
                        number,
                        request.num_logprobs or 0,
                        self._deliver_to(loop, choice),
                    )
                )
                self._texts.append(
                    ChoiceText(
                        model.tokenizer,
                        prompt,
                        (*request.stop, *model.stop_strings),
                        model.eos_ids,
                        request.num_logprobs is not None,
                    )
                )
        engine.submit(self._generations)

    @property
    def num_choices(self) -> int:
        """The number of choices, which is the number of prompts times n."""
        return len(self._texts)

    @property
    def usage(self) -> dict[str, int]:
        """The number of prompt tokens and generated tokens, as in OpenAI's API."""
        num_new = sum(text.num_tokens for text in self._texts)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_new,
            "total_tokens": self._num_prompt_tokens + num_new,
        }

    def cancel(self) -> None:
        """Cancels the generations that have not finished."""
        self._engine.cancel(
            [
                generation
                for generation, text in zip(self._generations, self._texts, strict=True)
                if text.finish_reason is None
            ]
        )

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yields new text for the choices as it is generated, until all choices are complete.

        Raises:
          ApiError: The time limit is reached before the first token, or the server shuts down.
        """
        has_begun, num_unfinished = False, len(self._texts)
        while num_unfinished:
            try:
                async with asyncio.timeout_at(self._deadline):
                    choice, piece = await self._pieces.get()
            except TimeoutError:
                if not has_begun:
                    raise ApiError(
                        504,
                        f"The request was not answered within its time limit of {self._seconds:g} "
                        "s, because the server is busy. Try again later.",
                        code="timeout",
                    ) from None
                self.cancel()
                for choice, text in enumerate(self._texts):
                    if text.finish_reason is None:
                        text.end(LENGTH)
                        yield self._delta(choice)
                return
            has_begun, text = True, self._texts[choice]
            if text.finish_reason is not None:  # Generated before the cancellation took effect.
                continue
            if piece.error is not None:
                raise piece.error
            text.add(piece)
            delta = self._delta(choice)
            if text.finish_reason is not None:
                num_unfinished -= 1
                if not piece.done:
                    self._engine.cancel([self._generations[choice]])
            if delta.text or delta.tokens or delta.finish_reason:
                yield delta

    def _delta(self, choice: int) -> Delta:
        text = self._texts[choice]
        return Delta(choice, *text.take(), text.finish_reason)

    def _deliver_to(self, loop: asyncio.AbstractEventLoop, choice: int) -> Callable[[Piece], None]:
        """Returns a function that passes pieces from the engine's thread to the event loop."""

        def deliver(piece: Piece) -> None:
            # The loop is closed if the server did not drain in time.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._pieces.put_nowait, (choice, piece))

        return deliver
