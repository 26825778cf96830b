"""Requests of the two kinds, completions and chat, read from JSON into a single form."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.sources.faults import none_skipped
from praxis_lite.inputs.text.messages import Conversation, conversation, conversation_of
from praxis_lite.inputs.tokenizers.chat_messages import Message
from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.fields import FLAG, TEXT, Field, checked, number, only, read, whole

# Prompts times n: of a request.
MOST_CHOICES = 128
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256
# Likeliest tokens that a request may ask for in addition to the chosen one.
MOST_LOGPROBS = 20
COMPLETION_TOKENS = 16  # Where max_tokens is not given, as in OpenAI's API.

Prompt = str | Sequence[int] | Conversation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A client's request for completions, its fields checked.

    Attributes:
      is_chat: the answer is a message.
      prompts: a text or token ids each; of a chat its conversation.
      max_tokens: most new ones; None: of a chat as many as there is room for, else 16.
      seed: None: drawn.
      num_logprobs: Tokens in addition to the chosen one; None: no log-probs at all.
    """

    is_chat: bool
    model: str
    prompts: Sequence[Prompt]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    seed: int | None = None
    stop: Sequence[str] = ()
    num_logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
      seconds: The most that it may take, including its time in the queue.
      api_key: The key that clients must send; None: none.
      hosts: Host headers that are answered; None: any. A foreign page in a browser on this machine
        would send another one.
    """

    seconds: float
    api_key: str | None = None
    hosts: frozenset[str] | None = None


def completion(body: bytes) -> Request:
    """Returns the request of /v1/completions; raises ApiError for anything that is not followed."""
    given = read(body, _COMPLETION)
    prompts = _required(given, "prompt")
    return Request(
        is_chat=False, prompts=prompts, max_tokens=given.get("max_tokens"),
        num_logprobs=given.get("logprobs"), **_common(given, len(prompts)),
    )


def chat(body: bytes) -> Request:
    """Returns the request of /v1/chat/completions, as `completion`."""
    given = read(body, _CHAT)
    num_logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
    if num_logprobs is None and "top_logprobs" in given:
        raise ApiError(
            400, "top_logprobs is given without logprobs; set logprobs: true.",
            param="top_logprobs", code="invalid_value",
        )
    if given.get("tools") and "tool_choice" not in given:
        raise ApiError(
            400, "tools are given without tool_choice; set tool_choice: none. The prompt names the "
            "tools then, and a call is part of the answer's text.", param="tools",
            code="invalid_value",
        )
    _required(given, "messages")
    row = {name: given[name] for name in ("messages", *_CONTEXT) if name in given}
    return Request(
        is_chat=True, prompts=[_checked(lambda: conversation_of(row, "The request"), "messages")],
        max_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
        num_logprobs=num_logprobs, **_common(given, 1),
    )


def _common(given: Mapping[str, Any], num_prompts: int) -> dict[str, Any]:
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if options and not stream:
        raise ApiError(
            400, "stream_options is given without stream; set stream: true, or leave it out.",
            param="stream_options", code="invalid_value",
        )
    if num_prompts * given.get("n", 1) > MOST_CHOICES:
        raise ApiError(
            400, f"{num_prompts} prompts with n = {given.get('n', 1)} are more than "
            f"{MOST_CHOICES} answers. Ask for them in several requests.", param="n",
            code="invalid_value",
        )
    names = ("temperature", "top_p", "top_k", "n", "seed", "stop")
    return {
        "model": _required(given, "model"), "stream": stream,
        "include_usage": options.get("include_usage", False),
        **{name: given[name] for name in names if name in given},
    }


def _required(given: Mapping[str, Any], name: str) -> Any:
    if name not in given:
        raise ApiError(400, f"{name} is missing. Give it.", param=name, code="missing_field")
    return given[name]


def _prompts(x: Any) -> Sequence[Prompt] | None:
    if isinstance(x, str) or _are_ids(x):
        return [x]
    is_list = isinstance(x, list) and 0 < len(x) <= MOST_CHOICES
    if is_list and (all(isinstance(item, str) for item in x) or all(map(_are_ids, x))):
        return x
    return None


def _are_ids(x: Any) -> bool:
    return isinstance(x, list) and len(x) > 0 and all(type(item) is int for item in x)


def _messages(x: Any) -> Sequence[Message] | None:
    if not isinstance(x, list) or not x:
        return None
    return _checked(lambda: conversation(x, "The request"), "messages")


def _checked(made: Callable[[], Any], param: str) -> Any:
    try:
        with none_skipped():
            return made()
    except ConfigError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


def _stops(x: Any) -> Sequence[str] | None:
    stops = [x] if isinstance(x, str) else x
    is_right = isinstance(stops, list) and len(stops) <= MOST_STOPS and all(
        isinstance(stop, str) and 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in stops
    )
    return tuple(stops) if is_right else None


def _stream_options(x: Any) -> Mapping[str, Any] | None:
    known = {"include_usage": FLAG, "include_obfuscation": _NOT_FOLLOWED_FLAG}
    return checked(x, known, "stream_options.") if isinstance(x, dict) else None


_NOT_FOLLOWED_FLAG = only(False, because="nothing else is offered")
_PENALTY = only(0, 0.0, because="penalties are not offered")
_SAMPLING = {
    "model": TEXT,
    "max_tokens": whole(1, 2**31 - 1),
    "temperature": number(0, 2),
    "top_p": Field(
        "a number above 0 and at most 1",
        lambda x: number(0, 1).check(x) or None,
    ),
    # As in vLLM, where -1 means all as well.
    "top_k": Field(
        "a whole number, 0 or -1 for all tokens",
        lambda x: max(x, 0) if type(x) is int and -1 <= x < 2**31 else None,
    ),
    "n": whole(1, MOST_CHOICES),
    "seed": whole(-(2**63), 2**63 - 1),
    "stop": Field(
        f"a text, or at most {MOST_STOPS} texts, of 1 to {MOST_STOP_CHARACTERS} characters",
        _stops,
    ),
    "stream": FLAG,
    "stream_options": Field('{"include_usage": true or false}', _stream_options),
    # Names for OpenAI's own accounts, which change no token.
    "user": TEXT,
    "metadata": Field("an object", lambda x: x if isinstance(x, dict) else None),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "logit_bias": only({}, because="biases are not offered"),
}
# Next to the messages of a chat, as in vLLM; see docs/finetuning.md.
_CONTEXT = ("tools", "documents", "chat_template_kwargs")
_COMPLETION = {
    "prompt": Field(
        f"a text, token ids, or at most {MOST_CHOICES} of either", _prompts,
    ),
    "logprobs": whole(0, MOST_LOGPROBS),
    **_SAMPLING,
    "best_of": only(1, because="the likeliest of several is not offered. Use n"),
    "echo": only(False, because="the prompt is not given back"),
    "suffix": only("", because="text before a suffix is not offered"),
}
_CHAT = {
    "messages": Field(
        'a list of {"role": TEXT, "content": TEXT}, at least one of them; of content in parts only '
        'those of {"type": "text"} are read', _messages,
    ),
    **{name: Field("as in a row of training data", lambda x: x) for name in _CONTEXT},
    "max_completion_tokens": whole(1, 2**31 - 1),
    "logprobs": FLAG,
    "top_logprobs": whole(0, MOST_LOGPROBS),
    **_SAMPLING,
    "tool_choice": only("none", because="calls stay in the answer's text"),
    "parallel_tool_calls": only(True, False, because="calls stay in the answer's text"),
    "response_format": only({"type": "text"}, because="answers are free text"),
    "modalities": only(["text"], because="answers are text"),
    "store": only(False, because="nothing is stored"),
}
