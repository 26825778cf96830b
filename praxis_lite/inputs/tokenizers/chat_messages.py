"""Converts the messages in a conversation to the format that chat templates expect."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.host.file_reading import unique_keys

__all__ = ("Message", "RefusedConversation", "ReservedText", "as_messages", "text_of")

USER, ASSISTANT = "user", "assistant"
Message = Mapping[str, Any]
# Keys for a model's reasoning, in the order in which transformers looks them up.
REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")
# Keys that a template may ignore, because their values are metadata. Ids of tool calls are metadata
# too: the order of calls and results carries the same information.
_LABELS = ("role", "id", "tool_call_id", "name", "weight", "train")
# Keys whose values may contain nulls that a template must render.
_WITH_NULLS = ("arguments", "parameters", "input_schema")


class RefusedConversation(ConfigError):
    """Raised if a conversation is malformed or is rejected by the chat template.

    Attributes:
      fault: Name of the fault in training data, a key of `faults.FAULTS`.
    """

    fault = "no_answer"


class UnreadKey(RefusedConversation):
    """Raised if a conversation contains data that the chat template would not show to the model."""

    fault = "unknown_key"


class ReservedText(RefusedConversation):
    """Raised if a conversation contains text that would be read as a special token."""

    fault = "special_token"


class _Arguments(dict):
    """Arguments of a tool call parsed from a JSON string; `str` returns the original string."""

    def __init__(self, text: str, values: Mapping[str, Any]):
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text


def as_messages(value: Any) -> list[Message]:
    """Validates messages and converts them to the format that chat templates expect.

    Null values are removed, except in the arguments of calls, because Arrow gives all objects in a
    column the same keys. Content parts become {"type": "text", "text": ...}, and tool call
    arguments that are JSON strings become objects. Reasoning is stored under the keys that
    transformers uses. `weight` and `train` are replaced by a weight of 0 if the message is not to
    be trained on, and are removed otherwise.

    Raises:
      RefusedConversation: The value is not a list of text messages. The error names the element.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise RefusedConversation(
            f"messages are {shortened(json.dumps(value, default=repr))}; expected a list of "
            '{"role": "user", "content": ...}, usually with the roles system, user and assistant. '
            "Correct them, or set the key that contains the messages."
        )
    return [_message(item, f"message {number}") for number, item in enumerate(value)]


def _message(value: Message, name: str) -> Message:
    result = without_nulls(value)
    if not isinstance(result.get("role"), str):
        raise RefusedConversation(
            f'{name} is {shortened(json.dumps(value, default=repr))}; expected {{"role": "user", '
            '"content": ...}. Correct it, or set the key that contains the messages.'
        )
    role, is_learned = result["role"], _is_learned(result, name)
    result = {key: item for key, item in result.items() if key not in ("weight", "train")}
    if "content" in result:
        result["content"] = _content(result["content"], name)
    elif is_empty(result):
        # Null content is an empty answer in an assistant message, and an error in other messages.
        if role != ASSISTANT or "content" not in value:
            raise RefusedConversation(
                f"{name} (role {role!a:.40}) has no content. Add content, or remove the message."
            )
        result["content"] = ""
    if (calls := result.get("tool_calls")) is not None:
        calls = _of_json(calls, f"tool_calls of {name}")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RefusedConversation(f"tool_calls of {name} is not a list of objects.")
        result["tool_calls"] = [_call(call, f"tool_calls of {name}") for call in calls]
    if isinstance(result.get("function_call"), dict):
        result["function_call"] = _call(result["function_call"], f"function_call of {name}")
    # Templates differ in the key from which they read the reasoning, so set both keys.
    reasoning = next((result[key] for key in REASONING if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result if is_learned else {**result, "weight": 0}


def without_nulls(value: Any) -> Any:
    """Removes keys whose value is null from a JSON value, at every depth.

    Nulls in the arguments of a call and in the parameters of a tool are data, and are kept.
    """
    if isinstance(value, Mapping):
        return {
            key: item if key in _WITH_NULLS else without_nulls(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def _is_learned(message: Message, name: str) -> bool:
    """Returns False if a message has weight 0 (OpenAI) or train false (axolotl), else True."""
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RefusedConversation(
            f"weight of {name} is {weight!a:.40}; expected 1, or 0 to exclude the answer from "
            "training. Other weights are not supported."
        )
    if train is not None and not isinstance(train, bool):
        raise RefusedConversation(f"train of {name} is {train!a:.40}; expected true or false.")
    is_learned = weight != 0 and train is not False
    is_marked = weight is not None or train is not None
    if is_marked and is_learned and message["role"] != ASSISTANT:
        raise RefusedConversation(
            f"{name} sets {'weight 1' if weight else 'train'}, but has the role "
            f"{message['role']!a:.40}; only assistant messages are trained on. Remove this key."
        )
    return is_learned


def _content(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RefusedConversation(
            f"content of {name} is {shortened(json.dumps(value, default=repr))}; expected a string "
            "or "
            'a list of {"type": "text", "text": ...}. Encode other values as a JSON string.'
        )
    return [_part(part, name) for part in value]


def _part(part: Any, name: str) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise UnreadKey(
            f"content of {name} contains {shortened(json.dumps(part, default=repr))}; expected "
            '{"type": "text", "text": ...}, because only text is supported. Remove this part.'
        )
    unread = [
        key for key, item in part.items() if key not in ("type", "text") and not _is_blank(item)
    ]
    if unread:
        raise UnreadKey(
            f"content of {name} has the unknown {'key' if len(unread) == 1 else 'keys'} "
            f"{', '.join(map(repr, unread))} in one of its parts; expected "
            '{"type": "text", "text": ...}. Remove all other keys.'
        )
    return {"type": "text", "text": part["text"]}


def _call(call: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], name)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    values = _of_json(arguments, f"arguments in {name}") if arguments.strip() else {}
    if not isinstance(values, dict):
        raise RefusedConversation(
            f"arguments in {name} is {shortened(arguments)}; expected a JSON object, or a JSON "
            "string of an object."
        )
    return {**call, "arguments": _Arguments(arguments, values)}


def _of_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise RefusedConversation(f"{name} is not valid JSON: {error}. Correct it.") from None


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Converts tool call arguments back to JSON strings, which older templates expect."""

    def of_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": of_call(call["function"])}
        arguments = call.get("arguments")
        if not isinstance(arguments, dict):
            return call
        # Arguments that were parsed from a string get back exactly this string.
        if isinstance(arguments, _Arguments):
            text = arguments.text
        else:
            text = json.dumps(arguments, ensure_ascii=False)
        return {**call, "arguments": text}

    return [
        {**message, "tool_calls": [of_call(call) for call in message["tool_calls"]]}
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def text_of(content: Any) -> str:
    """Returns message content as a string: parts are joined, and None becomes ""."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def strings_in(value: Any) -> Iterator[str]:
    """Yields all strings in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def is_empty(message: Message) -> bool:
    """Returns whether a message contains neither text nor tool calls, reasoning or other data."""
    others = (item for key, item in message.items() if key not in (*_LABELS, "content"))
    return not text_of(message.get("content")).strip() and all(map(_is_blank, others))


def unread_candidates(message: Message) -> list[tuple[str, ...]]:
    """Returns the message keys that a template must read, grouping the keys for reasoning."""
    labels = {"content", *_LABELS}
    if message["role"] in ("user", "assistant", "system", "developer"):
        labels -= {"name"}  # In a tool message, it is metadata that repeats the name in the call.
    keys = [key for key, item in message.items() if key not in labels and not _is_blank(item)]
    reasoning = tuple(key for key in keys if key in REASONING)
    return [*([reasoning] if reasoning else []), *((key,) for key in keys if key not in REASONING)]


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)
