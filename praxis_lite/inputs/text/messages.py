"""Reads conversations from rows in the usual formats of datasets.

Only this module knows the keys of a row: training data, preferences, prompts and requests are all
read here. docs/finetuning.md lists the formats.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import did_you_mean, shown
from praxis_lite.inputs.sources.faults import BadExample, missing_key
from praxis_lite.inputs.sources.files.texts import to_json_value
from praxis_lite.inputs.tokenizers.chat_messages import (
    ASSISTANT,
    USER,
    Message,
    RefusedConversation,
    UnreadKey,
    as_messages,
    without_nulls,
)

__all__ = ("Conversation", "conversation", "conversation_of")

# Keys that a row may have next to its messages.
CONTEXT_KEYS = ("system", "tools", "documents", "chat_template_kwargs")
_ALPACA_KEYS = ("instruction", "input", "output", "history")
# The roles of ShareGPT and LLaMA-Factory; other names are unchanged.
_SHAREGPT_ROLES = {
    "human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT,
    "observation": "tool", "function_response": "tool",
}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages, and variables of the chat template.

    Attributes:
      messages: as `as_messages`; those of the assistant with weight 0 are not trained on.
      variables: `tools`, `documents` and `chat_template_kwargs` of the row.
      where: "file:line", for messages.
    """

    messages: Sequence[Message]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""


@contextlib.contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Turns RefusedConversation into a BadExample that names `where` the conversation is."""
    try:
        yield
    except RefusedConversation as error:
        fault = "unknown_key" if isinstance(error, UnreadKey) else "no_answer"
        found, is_fixable, fix = str(error).rpartition(". ")
        if not is_fixable:
            found, fix = fix.rstrip("."), "Correct it, or leave it out."
        raise BadExample(fault, f"{where}:", found, fix) from None


def row_without_nulls(
    row: Mapping[str, Any], where: str, ignored_keys: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns a row as plain JSON values, without keys that are null or ignored."""
    return to_json_value({
        name: item for name, item in row.items() if item is not None and name not in ignored_keys
    }, where)


def require_known(row: Mapping[str, Any], known: Iterable[str], where: str, fix: str = "") -> None:
    """Checks that a row without nulls has only keys that are read.

    Raises:
      BadExample: `unknown_key`: names the keys that would be lost, and the known keys.
    """
    known = tuple(known)
    unknown = [str(name) for name in row if name not in known]
    if not unknown:
        return
    names = ", ".join(repr(shown(name, 40)) for name in unknown[:20])
    fix = fix or (
        f"Correct them, or have them ignored: ignored_keys=[{names}] of Documents or "
        "PreferenceData."
    )
    raise BadExample(
        "unknown_key", where,
        f"has {names}, which {'is' if len(unknown) == 1 else 'are'} not read; known are "
        f"{', '.join(known)}",
        f"{did_you_mean(unknown[0], known).strip()} Variables of the chat template belong in "
        f"chat_template_kwargs. {fix}".strip(),
    )


def conversation_of(
    row: Mapping[str, Any], where: str, *, holds: str = "messages", key: str | None = None,
    ignored_keys: Iterable[str] = (), fix: str = "",
) -> Conversation:
    """Returns the conversation of a row.

    Args:
      holds: the format: "messages", "sharegpt" or "alpaca".
      key: of the messages; None: the usual one.
      ignored_keys: of the row, which are not read.
      fix: what to change if there are unknown keys; "": ignored_keys of Documents.

    Raises:
      BadExample: the row has another form, or an unknown key.
    """
    given, row = row, row_without_nulls(row, where, ignored_keys)
    if holds == "alpaca":
        require_known(row, (*_ALPACA_KEYS, *CONTEXT_KEYS), where, fix)
        return with_context(_of_alpaca(row, where), row, where, wraps_tools=True)
    if key is None:
        # TRL also accepts `conversations` for messages.
        is_usual = holds == "messages" and ("messages" in row or "conversations" not in row)
        key = "messages" if is_usual else "conversations"
    if key not in row:
        raise missing_key(key, given, where)
    require_known(row, (key, *CONTEXT_KEYS), where, fix)
    return with_context(conversation(row[key], where), row, where, wraps_tools=holds == "sharegpt")


def conversation(value: Any, where: str) -> list[Message]:
    """Returns messages; [] of an empty list.

    {"from", "value"} of ShareGPT become {"role", "content"}.

    Raises:
      BadExample: it is not a list of messages, or a text has half of a character.
    """
    value = to_json_value(value, where)
    with errors_at(where):
        if isinstance(value, list):
            value = [_of_sharegpt(item) for item in value]
        return as_messages(value)


def _of_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
        return message
    result = without_nulls(message)
    if {"role", "content"} & result.keys():
        return message
    role, content = result.pop("from", None), result.pop("value", None)
    if role != "function_call":
        return {"role": _SHAREGPT_ROLES.get(str(role), role), "content": content, **result}
    # LLaMA-Factory: one or several calls as JSON text.
    try:
        calls = json.loads(content)
    except (TypeError, ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RefusedConversation(
            f"function_call is {shown(str(content))}; expected the JSON text of "
            '{"name": ..., "arguments": {...}}, or of a list of them. Correct it.'
        )
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": ASSISTANT, "tool_calls": calls, **result}


def _of_alpaca(row: Mapping[str, Any], where: str) -> list[Message]:
    """Returns the messages of {"instruction", "input", "output", "history"}.

    The user's message is the instruction and, on a new line, the input if there is one. Before it
    are the pairs of a question and an answer in `history`.
    """
    texts = {name: row.get(name, "") for name in _ALPACA_KEYS[:3]}
    for name, text in texts.items():
        if name not in row and name != "input":
            raise missing_key(name, row, where)
        if not isinstance(text, str):
            raise _wrong_value(row, name, where, "a text")
    pairs = row.get("history", [])
    is_right = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    )
    if not is_right:
        raise _wrong_value(
            row, "history", where, "a list of pairs of texts: [[question, answer], ...]"
        )
    asked = "\n".join(filter(None, (texts["instruction"], texts["input"])))
    turns = [*pairs, (asked, texts["output"])]
    return [
        {"role": role, "content": text} for turn in turns
        for role, text in zip((USER, ASSISTANT), turn, strict=True)
    ]


def with_context(
    messages: Sequence[Message], row: Mapping[str, Any], where: str, *, wraps_tools: bool = False
) -> Conversation:
    """Returns a conversation of messages and the row's CONTEXT_KEYS.

    Args:
      row: without nulls.
      wraps_tools: True: a plain function becomes {"type": "function", "function": ...}, as in
        LLaMA-Factory's formats; TRL passes it unchanged.

    Raises:
      BadExample: a value has another form; or there are two system messages.
    """
    messages = list(messages)
    system = row.get("system", "")
    if not isinstance(system, str):
        raise _wrong_value(row, "system", where, "a text")
    if system:
        first = {"role": "system", "content": system}
        if not messages or messages[0] != first:
            if any(message["role"] == "system" for message in messages):
                raise BadExample(
                    "unknown_key", where, "has 'system' and also a system message",
                    "Remove one of them.",
                )
            messages.insert(0, first)
    variables = {}
    for name in ("tools", "documents"):
        value = _parse_json(row.get(name), name, row, where)
        if not isinstance(value, list | None):
            raise _wrong_value(row, name, where, "a list of objects, or its JSON text")
        items = [_parse_json(item, name, row, where) for item in value or ()]
        if not isinstance(row.get(name), str):
            items = without_nulls(items)
        if not all(isinstance(item, dict) for item in items):
            raise _wrong_value(row, name, where, "a list of objects, or its JSON text")
        if name == "tools" and wraps_tools:
            items = [
                item if "function" in item else {"type": "function", "function": item}
                for item in items
            ]
        if items:
            variables[name] = items
    more = _parse_json(row.get("chat_template_kwargs"), "chat_template_kwargs", row, where) or {}
    more = without_nulls(more)
    if not isinstance(more, dict):
        raise _wrong_value(row, "chat_template_kwargs", where, "an object")
    if taken := [name for name in more if name in (*variables, *_RENDERING_VARIABLES)]:
        raise BadExample(
            "unknown_key", where,
            f"has {taken[0]!r} in chat_template_kwargs, which is set elsewhere", "Remove it there.",
        )
    return Conversation(messages, {**variables, **more}, where)


# Variables that a conversation must not set.
_RENDERING_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message")


def _parse_json(value: Any, name: str, row: Mapping[str, Any], where: str) -> Any:
    if not isinstance(value, str) or not value:
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _wrong_value(row, name, where, "JSON") from None


def _wrong_value(row: Mapping[str, Any], name: str, where: str, expected: str) -> BadExample:
    return BadExample(
        "missing_key", where,
        f"has {shown(json.dumps(row[name], default=repr))} as {name!r}; expected {expected}",
        "Correct it, or leave it out.",
    )
