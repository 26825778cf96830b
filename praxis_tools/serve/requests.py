"""Parses and validates the JSON of completion and chat requests."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.sources.faults import none_skipped
from praxis_lite.inputs.text.messages import Conversation, conversation_of
from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.fields import FLAG, TEXT, Field, checked, integer, number, only, read

MAX_CHOICES = 128  # Maximum value of n times the number of prompts in a request.
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
# Maximum number of alternatives that can be requested for each token.
MAX_LOGPROBS = 20
COMPLETION_TOKENS = 16  # Default value of max_tokens for completions, as in OpenAI's API.

Prompt = str | Sequence[int] | Conversation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A validated request for completions.

    Attributes:
      is_chat: Whether this is a chat request, which is answered with a message.
      model: Name of the model.
      prompts: Texts or token ids, or the conversation of a chat request.
      max_tokens: Maximum number of new tokens. If None, a chat may use all remaining positions, and
        a completion has at most 16 tokens.
      temperature: Sampling temperature.
      top_p: Probability mass for nucleus sampling.
      top_k: Number of most likely tokens to sample from, or 0 for all tokens.
      n: Number of answers to each prompt.
      seed: Seed for sampling, or None for a random seed.
      stop: Strings that end the answer.
      num_logprobs: Number of alternatives to report for each token, or None for no log-probs.
      stream: Whether to stream the answer.
      include_usage: Whether a stream ends with the token counts.
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
    """Limits that apply to each request.

    Attributes:
      seconds: Maximum duration, including the time in the queue.
      api_key: API key that clients must send, or None if no key is required.
      hosts: Allowed Host headers, or None for any. This protects against DNS rebinding, in which a
        website in a browser on this machine sends requests with its own host name.
    """

    seconds: float
    api_key: str | None = None
    hosts: frozenset[str] | None = None


def completion(body: bytes) -> Request:
    """Parses a request to /v1/completions; raises ApiError if it is invalid or unsupported."""
    given = read(body, _COMPLETION)
    prompts = _required(given, "prompt")
    return Request(
        is_chat=False,
        prompts=prompts,
        max_tokens=given.get("max_tokens"),
        num_logprobs=given.get("logprobs"),
        **_common(given, len(prompts)),
    )


def chat(body: bytes) -> Request:
    """Parses a request to /v1/chat/completions; raises ApiError if it is invalid or unsupported."""
    given = read(body, _CHAT)
    num_logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
    if num_logprobs is None and "top_logprobs" in given:
        raise ApiError(
            400,
            "top_logprobs requires logprobs. Set logprobs: true.",
            param="top_logprobs",
            code="invalid_value",
        )
    if given.get("tools") and "tool_choice" not in given:
        raise ApiError(
            400,
            "tools without tool_choice are not supported. Set tool_choice: none. The prompt then "
            "describes the tools, and the answer's text contains the calls.",
            param="tools",
            code="invalid_value",
        )
    _required(given, "messages")
    row = {name: given[name] for name in ("messages", *_CONTEXT) if name in given}
    try:
        with none_skipped():
            prompt = conversation_of(row, "The request")
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from None
    return Request(
        is_chat=True,
        prompts=[prompt],
        max_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
        num_logprobs=num_logprobs,
        **_common(given, 1),
    )


def _common(given: Mapping[str, Any], num_prompts: int) -> dict[str, Any]:
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if options and not stream:
        raise ApiError(
            400,
            "stream_options requires stream. Set stream: true, or remove stream_options.",
            param="stream_options",
            code="invalid_value",
        )
    if num_prompts * given.get("n", 1) > MAX_CHOICES:
        raise ApiError(
            400,
            f"{num_prompts} prompts with n = {given.get('n', 1)} exceed the limit of "
            f"{MAX_CHOICES} answers. Split them into several requests.",
            param="n",
            code="invalid_value",
        )
    names = ("temperature", "top_p", "top_k", "n", "seed", "stop")
    return {
        "model": _required(given, "model"),
        "stream": stream,
        "include_usage": options.get("include_usage", False),
        **{name: given[name] for name in names if name in given},
    }


def _required(given: Mapping[str, Any], name: str) -> Any:
    if name not in given:
        raise ApiError(
            400, f"The required field {name} is missing.", param=name, code="missing_field"
        )
    return given[name]


def _prompts(x: Any) -> Sequence[Prompt] | None:
    if isinstance(x, str) or _are_ids(x):
        return [x]
    is_list = isinstance(x, list) and 0 < len(x) <= MAX_CHOICES
    if is_list and (all(isinstance(item, str) for item in x) or all(map(_are_ids, x))):
        return x
    return None


def _are_ids(x: Any) -> bool:
    return isinstance(x, list) and len(x) > 0 and all(type(item) is int for item in x)


def _stops(x: Any) -> Sequence[str] | None:
    stops = [x] if isinstance(x, str) else x
    is_valid = (
        isinstance(stops, list)
        and len(stops) <= MAX_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops)
    )
    return tuple(stops) if is_valid else None


def _stream_options(x: Any) -> Mapping[str, Any] | None:
    known = {"include_usage": FLAG, "include_obfuscation": _UNSUPPORTED_FLAG}
    return checked(x, known, "stream_options.") if isinstance(x, dict) else None


_UNSUPPORTED_FLAG = only(False, because="other values are not supported")
_PENALTY = only(0, 0.0, because="penalties are not supported")
_SAMPLING = {
    "model": TEXT,
    "max_tokens": integer(1, 2**31 - 1),
    "temperature": number(0, 2),
    "top_p": Field(
        "a number above 0 and at most 1",
        lambda x: number(0, 1).check(x) or None,
    ),
    # As in vLLM, -1 also means all tokens.
    "top_k": Field(
        "an integer, 0 or -1 for all tokens",
        lambda x: max(x, 0) if type(x) is int and -1 <= x < 2**31 else None,
    ),
    "n": integer(1, MAX_CHOICES),
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": Field(
        f"a string, or at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARACTERS} characters",
        _stops,
    ),
    "stream": FLAG,
    "stream_options": Field('{"include_usage": true or false}', _stream_options),
    # Fields for OpenAI's accounting, which are ignored.
    "user": TEXT,
    "metadata": Field("an object", lambda x: x if isinstance(x, dict) else None),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "logit_bias": only({}, because="biases are not supported"),
}
# Additional inputs of chat templates, as in vLLM; see docs/finetuning.md.
_CONTEXT = ("tools", "documents", "chat_template_kwargs")
_COMPLETION = {
    "prompt": Field(
        f"a string, a list of token ids, or a list of at most {MAX_CHOICES} of either",
        _prompts,
    ),
    "logprobs": integer(0, MAX_LOGPROBS),
    **_SAMPLING,
    "best_of": only(1, because="selecting the best of several answers is not supported. Use n"),
    "echo": only(False, because="returning the prompt is not supported"),
    "suffix": only("", because="inserting text before a suffix is not supported"),
}
_CHAT = {
    "messages": Field(
        'a non-empty list of {"role": TEXT, "content": TEXT}, where content may be a list of '
        '{"type": "text"} parts',
        lambda x: x if isinstance(x, list) and x else None,
    ),
    **{name: Field("a value as in a training example", lambda x: x) for name in _CONTEXT},
    "max_completion_tokens": integer(1, 2**31 - 1),
    "logprobs": FLAG,
    "top_logprobs": integer(0, MAX_LOGPROBS),
    **_SAMPLING,
    "tool_choice": only("none", because="tool calls are returned as text"),
    "parallel_tool_calls": only(True, False, because="tool calls are returned as text"),
    "response_format": only({"type": "text"}, because="only free text is supported"),
    "modalities": only(["text"], because="only text is supported"),
    "store": only(False, because="answers are not stored"),
}
