"""Reads conversations from dataset rows in the common formats.

This is the only module that depends on the keys in a row: training data, preferences, prompts and
requests are all read here. docs/finetuning.md lists the formats.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import did_you_mean, shortened
from praxis_lite.host.file_reading import unique_keys
from praxis_lite.inputs.sources.faults import BadExample, missing_key
from praxis_lite.inputs.sources.files.texts import to_json_value
from praxis_lite.inputs.tokenizers.chat_messages import (
    ASSISTANT,
    USER,
    Message,
    RefusedConversation,
    as_messages,
    without_nulls,
)

__all__ = ("Conversation", "conversation", "conversation_of")

# Keys that a row may contain in addition to its messages.
CONTEXT_KEYS = ("system", "tools", "documents", "chat_template_kwargs")
_ALPACA_KEYS = ("instruction", "input", "output", "history")
# Role names of ShareGPT and LLaMA-Factory. All other role names are kept unchanged.
_SHAREGPT_ROLES = {
    "human": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The messages of a conversation, and the variables for its chat template.

    Attributes:
      messages: Messages as returned by `as_messages`. Assistant messages with weight 0 are not
        trained on.
      variables: The row's `tools` and `documents`, and the entries in its `chat_template_kwargs`.
      where: Location of the row for error messages, as "file:line".
    """

    messages: Sequence[Message]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""


@contextlib.contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Converts a RefusedConversation to a BadExample with the location `where`."""
    try:
        yield
    except RefusedConversation as error:
        found, is_fixable, fix = str(error).rpartition(". ")
        if not is_fixable:
            found, fix = fix.rstrip("."), "Correct or remove it."
        raise BadExample(error.fault, f"{where}:", found, fix) from None


def row_without_nulls(
    row: Mapping[str, Any], where: str, ignored_keys: Iterable[str] = ()
) -> dict[str, Any]:
    """Converts a row to plain JSON values, without ignored keys and keys whose value is null."""
    return to_json_value(
        {name: item for name, item in row.items() if item is not None and name not in ignored_keys},
        where,
    )


def require_known(row: Mapping[str, Any], known: Iterable[str], where: str, fix: str = "") -> None:
    """Checks that a row without nulls contains only known keys.

    Raises:
      BadExample: The row contains other keys, which would otherwise be ignored silently. The error
        message lists these keys and the known keys.
    """
    known = tuple(known)
    unknown = [str(name) for name in row if name not in known]
    if not unknown:
        return
    names = ", ".join(repr(shortened(name, 40)) for name in unknown[:20])
    fix = fix or (
        f"Correct them, or ignore them by passing ignored_keys=[{names}] to Documents or "
        "PreferenceData."
    )
    raise BadExample(
        "unknown_key",
        where,
        f"has the unknown {'key' if len(unknown) == 1 else 'keys'} {names}; the known keys are "
        f"{', '.join(known)}",
        f"{did_you_mean(unknown[0], known).strip()} Put chat template variables in "
        f"chat_template_kwargs. {fix}".strip(),
    )


def conversation_of(
    row: Mapping[str, Any],
    where: str,
    *,
    format: str = "messages",
    key: str | None = None,
    ignored_keys: Iterable[str] = (),
    fix: str = "",
) -> Conversation:
    """Reads the conversation from a row.

    Args:
      row: The row.
      where: Location of the row for error messages, as "file:line".
      format: Format of the row: "messages", "sharegpt" or "alpaca".
      key: Key of the messages. If None, the default key of the format.
      ignored_keys: Keys of the row to ignore.
      fix: Advice for the error message about unknown keys. If empty, the message recommends
        `ignored_keys` of Documents.

    Raises:
      BadExample: The row does not have the given format, or contains an unknown key.
    """
    original_row, row = row, row_without_nulls(row, where, ignored_keys)
    if format == "alpaca":
        require_known(row, (*_ALPACA_KEYS, *CONTEXT_KEYS), where, fix)
        return with_context(_of_alpaca(row, where), row, where, wraps_tools=True)
    if key is None:
        # TRL also accepts messages under the key `conversations`.
        is_usual = format == "messages" and ("messages" in row or "conversations" not in row)
        key = "messages" if is_usual else "conversations"
    if key not in row:
        raise missing_key(key, original_row, where)
    require_known(row, (key, *CONTEXT_KEYS), where, fix)
    return with_context(conversation(row[key], where), row, where, wraps_tools=format == "sharegpt")


def conversation(value: Any, where: str) -> list[Message]:
    """Reads a list of messages, which may be empty.

    ShareGPT's keys "from" and "value" are renamed to "role" and "content".

    Raises:
      BadExample: The value is not a list of messages, or a string is not valid Unicode.
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
    # In LLaMA-Factory, the value is one call or a list of calls, encoded as a JSON string.
    try:
        calls = json.loads(content, object_pairs_hook=unique_keys)
    except (TypeError, ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RefusedConversation(
            f"function_call is {shortened(str(content))}; expected a JSON string with an object "
            '{"name": ..., "arguments": {...}} or a list of such objects. Correct it.'
        )
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": ASSISTANT, "tool_calls": calls, **result}


def _of_alpaca(row: Mapping[str, Any], where: str) -> list[Message]:
    """Converts an Alpaca row to messages.

    The user's message is the instruction, followed on a new line by the input, if any. The
    question-answer pairs in `history` precede the user's message.
    """
    texts = {name: row.get(name, "") for name in _ALPACA_KEYS[:3]}
    for name, text in texts.items():
        if name not in row and name != "input":
            raise missing_key(name, row, where)
        if not isinstance(text, str):
            raise _wrong_value(row, name, where, "a string")
    pairs = row.get("history", [])
    is_valid = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    )
    if not is_valid:
        raise _wrong_value(
            row, "history", where, "a list of pairs of strings: [[question, answer], ...]"
        )
    question = "\n".join(filter(None, (texts["instruction"], texts["input"])))
    turns = [*pairs, (question, texts["output"])]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip((USER, ASSISTANT), turn, strict=True)
    ]


def with_context(
    messages: Sequence[Message], row: Mapping[str, Any], where: str, *, wraps_tools: bool = False
) -> Conversation:
    """Returns the conversation with the given messages and the CONTEXT_KEYS of their row.

    Args:
      messages: Messages as returned by `conversation`.
      row: The row, without nulls.
      where: Location of the row for error messages, as "file:line".
      wraps_tools: Whether to wrap plain functions as {"type": "function", "function": ...}, as
        LLaMA-Factory does for its formats. TRL leaves plain functions unchanged.

    Raises:
      BadExample: A value has the wrong type, or the row sets `system` although the messages already
        contain a system message.
    """
    messages = list(messages)
    system = row.get("system", "")
    if not isinstance(system, str):
        raise _wrong_value(row, "system", where, "a string")
    # `system` may repeat the first message.
    if system:
        first = {"role": "system", "content": system}
        if not messages or messages[0] != first:
            if any(message["role"] == "system" for message in messages):
                raise BadExample(
                    "unknown_key",
                    where,
                    "has both the key 'system' and a system message",
                    "Remove one of them.",
                )
            messages.insert(0, first)
    variables = {}
    for name in ("tools", "documents"):
        value = _parse_json(row.get(name), name, row, where)
        if not isinstance(value, list | None):
            raise _wrong_value(row, name, where, "a list of objects, or a JSON string of one")
        items = [_parse_json(item, name, row, where) for item in value or ()]
        # Outside of JSON strings, nulls may come from Arrow, where all structs have equal fields;
        # sources over Arrow have already removed them from the parameters.
        if not isinstance(row.get(name), str):
            items = without_nulls(items)
        if not all(isinstance(item, dict) for item in items):
            raise _wrong_value(row, name, where, "a list of objects, or a JSON string of one")
        if name == "tools" and wraps_tools:
            items = [
                item if "function" in item else {"type": "function", "function": item}
                for item in items
            ]
        if items:
            variables[name] = items
    kwargs = _parse_json(row.get("chat_template_kwargs"), "chat_template_kwargs", row, where) or {}
    kwargs = without_nulls(kwargs)
    if not isinstance(kwargs, dict):
        raise _wrong_value(row, "chat_template_kwargs", where, "an object")
    # chat_template_kwargs must not replace variables that are set elsewhere.
    if reserved := [name for name in kwargs if name in (*variables, *_RENDERING_VARIABLES)]:
        raise BadExample(
            "unknown_key",
            where,
            f"sets {reserved[0]!r} in chat_template_kwargs, but this variable is set elsewhere",
            "Remove the variable from chat_template_kwargs.",
        )
    return Conversation(messages, {**variables, **kwargs}, where)


# Variables that are set when a template is rendered, so a row must not set them.
_RENDERING_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message")


def _parse_json(value: Any, name: str, row: Mapping[str, Any], where: str) -> Any:
    if not isinstance(value, str) or not value:
        return value or None
    try:
        return json.loads(value, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        raise _wrong_value(row, name, where, "JSON") from None


def _wrong_value(row: Mapping[str, Any], name: str, where: str, expected: str) -> BadExample:
    return BadExample(
        "missing_key",
        where,
        f"has {shortened(json.dumps(row[name], default=repr))} as {name!r}; expected {expected}",
        "Correct or remove it.",
    )
