"""Builds the JSON bodies and stream chunks of answers, in the format of OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Any

from praxis_tools.serve.answer import Answer, Delta
from praxis_tools.serve.choice_text import NamedToken, Token

Json = Mapping[str, Any]


def complete_body(answer: Answer, model: str, deltas: Sequence[Delta]) -> Json:
    """Returns the body of an answer that is not streamed."""
    is_chat, choices = answer.request.is_chat, []
    for choice in sorted({delta.choice for delta in deltas}):
        pieces = [delta for delta in deltas if delta.choice == choice]
        text = "".join(delta.text for delta in pieces)
        tokens = [token for delta in pieces for token in delta.tokens]
        message = {"role": "assistant", "content": text, "refusal": None}
        choices.append(
            {
                "index": choice,
                **({"message": message} if is_chat else {"text": text}),
                "logprobs": _logprobs(answer, tokens),
                "finish_reason": pieces[-1].finish_reason,
            }
        )
    kind = "chat.completion" if is_chat else "text_completion"
    return {**_head(answer, model, kind), "choices": choices, "usage": answer.usage}


def first_chunks(answer: Answer, model: str) -> list[Json]:
    """Returns the chunks sent before any text: in a chat, the role of each choice."""
    if not answer.request.is_chat:
        return []
    delta = {"role": "assistant", "content": "", "refusal": None}
    return [
        _chunk(
            answer,
            model,
            {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None},
        )
        for choice in range(answer.num_choices)
    ]


def chunk(answer: Answer, model: str, delta: Delta) -> Json:
    """Returns the chunk for a delta."""
    text: Json = {"text": delta.text}
    if answer.request.is_chat:
        text = {"delta": {"content": delta.text} if delta.text else {}}
    logprobs = _logprobs(answer, delta.tokens) if delta.tokens else None
    return _chunk(
        answer,
        model,
        {
            "index": delta.choice,
            **text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        },
    )


def usage_chunk(answer: Answer, model: str) -> Json:
    """Returns the last chunk of a stream with `include_usage`, which contains the token counts."""
    return {**_chunk(answer, model, None), "usage": answer.usage}


def _chunk(answer: Answer, model: str, choice: Json | None) -> Json:
    kind = "chat.completion.chunk" if answer.request.is_chat else "text_completion"
    usage = {"usage": None} if answer.request.include_usage else {}
    choices = [] if choice is None else [choice]
    return {**_head(answer, model, kind), "choices": choices, **usage}


def _head(answer: Answer, model: str, kind: str) -> Json:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": model}


def _logprobs(answer: Answer, tokens: Sequence[Token]) -> Json | None:
    if answer.request.num_logprobs is None:
        return None
    if answer.request.is_chat:
        content = [
            {
                **_entry(token),
                "top_logprobs": [_entry(other) for other in token.likeliest],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_logprob_by_text(token) for token in tokens]
        if answer.request.num_logprobs
        else None,
        "text_offset": [token.offset for token in tokens],
    }


def _logprob_by_text(token: Token) -> dict[str, float]:
    """Returns a dict from text to log-prob for a generated token and its alternatives.

    If several tokens have the same text, the dict contains the log-prob of the most likely of these
    tokens.
    """
    candidates: list[NamedToken | Token] = [*token.likeliest, token]
    return {candidate.text: candidate.logprob for candidate in reversed(candidates)}


def _entry(token: NamedToken | Token) -> Json:
    content = None if token.content is None else list(token.content)
    return {"token": token.text, "logprob": token.logprob, "bytes": content}
