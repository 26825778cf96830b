"""Conversations as lists of messages, in the forms in which data have them."""

import json
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import shown
from praxis_lite.inputs.sources.faults import BadExample, missing_key
from praxis_lite.inputs.sources.files.texts import plain

USER, ASSISTANT = "user", "assistant"
Message = Mapping[str, Any]
# The roles of ShareGPT by their usual names; others stay as they are.
_SHAREGPT_ROLES = {
    "human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT,
}


def conversation(value: Any, where: str) -> list[Message]:
    """Returns messages, each with a "role" and a "content"; [] of an empty list.

    Names whose value is null are left out, but a content, which is null where there is none: with
    `tool_calls`, say. {"from", "value"} of ShareGPT become {"role", "content"}.

    Raises:
      BadExample: it is no list of messages, or a text has half of a character.
    """
    value = plain(value, where)
    messages = [_message(item) for item in value] if isinstance(value, list) else [None]
    if None in messages:
        raise BadExample(
            "no_answer", f"{where}:",
            f'messages are {shown(json.dumps(value, default=repr))}; wanted is a list of {{"role": '
            '"user", "content": ...}, with the roles system, user and assistant as a rule',
            "Mend it, or name the key of the messages.",
        )
    return messages


def _message(value: Any) -> Message | None:
    if not isinstance(value, dict):
        return None
    result = {name: item for name, item in value.items() if item is not None}
    if "from" in result and "value" in result and not {"role", "content"} & result.keys():
        role = result.pop("from")
        content = result.pop("value")
        result = {"role": _SHAREGPT_ROLES.get(str(role), role), "content": content, **result}
    has_more = bool(result.keys() - {"role", "content", "name"})
    is_message = isinstance(result.get("role"), str) and ("content" in result or has_more)
    return {"content": None, **result} if is_message else None


def is_empty(message: Message) -> bool:
    """Returns True if a message says nothing: no content, and no call of a tool or the like."""
    return not message["content"] and not message.keys() - {"role", "content", "name"}


def of_alpaca(example: Mapping[str, Any], where: str) -> list[Message]:
    """Returns the conversation of {"instruction", "input", "output"}, and perhaps "system".

    The user says the instruction, and on a new line the input, if there is one.

    Raises:
      BadExample: an instruction or an output is missing, or not a text.
    """
    texts = {}
    for name in ("system", "instruction", "input", "output"):
        text = plain(example.get(name), where)
        if text is None and name in ("instruction", "output"):
            raise missing_key(name, example, where)
        if not isinstance(text, str | None):
            raise BadExample(
                "missing_key", where, f"has {shown(repr(text))} as {name!r}; wanted is a text",
                "Mend it, or leave it out.",
            )
        texts[name] = text or ""
    asked = "\n".join(filter(None, (texts["instruction"], texts["input"])))
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [
        *system, {"role": USER, "content": asked}, {"role": ASSISTANT, "content": texts["output"]},
    ]
