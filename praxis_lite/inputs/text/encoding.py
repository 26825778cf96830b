"""Encodes examples for a language model as token ids and a mask of training targets."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from praxis_lite.core.errors import shortened
from praxis_lite.inputs.sources.faults import BadExample, missing_key
from praxis_lite.inputs.sources.files.texts import decode_utf8, require_valid_unicode
from praxis_lite.inputs.text.conversations import Tokens, tokens_of
from praxis_lite.inputs.text.messages import (
    CONTEXT_KEYS,
    Conversation,
    conversation,
    conversation_of,
    require_known,
    row_without_nulls,
    with_context,
)
from praxis_lite.inputs.text.pairs import Pair, pair_of, prompted, without_prompt
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import ASSISTANT, is_empty

# Keys of tokenized rows that mark padding, or tokens that are not trained on.
_MASKS = ("labels", "attention_mask", "loss_mask", "assistant_masks", "completion_mask")

# The default key of each example format, or None for formats with several fixed keys.
KEYS = {
    "text": "text",
    "ids": "ids",
    "messages": "messages",
    "completion": "completion",
    "sharegpt": "conversations",
    "alpaca": None,
    "preference": None,
}


def encoded(
    format: str,
    key: str | None,
    example: Mapping[str, Any],
    tokenizer: Tokenizer,
    where: str,
    ignored_keys: Iterable[str] = (),
) -> Tokens | Pair | None:
    """Encodes an example, including start and end tokens.

    Returns None for an empty example, which would only teach the model to stop immediately.

    Args:
      format: Format of the example, a key of KEYS.
      key: Key of the value in the example. If None, the default key of the format.
      example: The example.
      tokenizer: Tokenizer, with a chat template if the example is a conversation.
      where: Location of the example for error messages, as "file:line".
      ignored_keys: Keys to ignore in conversations, preference pairs and rows of ids.

    Raises:
      BadExample: The key is missing, or its value or a token id is invalid, or a conversation
        contains an unknown key, or a row of ids also has a mask of padding or targets.
    """
    if format == "preference":
        return pair_of(example, tokenizer, where, ignored_keys)
    if format in ("messages", "sharegpt", "alpaca"):
        conversation = conversation_of(
            example, where, format=format, key=key, ignored_keys=ignored_keys
        )
        return _of_conversation(conversation, tokenizer, where)
    key = key or KEYS[format]
    assert key is not None, f"the format {format!r} has no default key"
    if format == "completion":
        return _of_completion(example, key, tokenizer, where, ignored_keys)
    value = _value(example, key, where)
    if format == "ids":
        tokens = _of_ids(value, key, tokenizer.vocab_size, where)
        if tokens is not None:
            _check_masks(example, tokens.ids, where, ignored_keys)
        return tokens
    ids = tokenizer.encode(_text(value, key, where), False)
    if not len(ids):
        return None
    ids = tokenizer.with_end(tokenizer.with_start(ids))
    return Tokens(ids, np.ones(len(ids), bool))


def _of_completion(
    example: Mapping[str, Any],
    key: str,
    tokenizer: Tokenizer,
    where: str,
    ignored_keys: Iterable[str],
) -> Tokens | None:
    """Tokenizes a prompt and its completion, which are two strings or two lists of messages."""
    for name in (key, "prompt"):
        _value(example, name, where)
    row = row_without_nulls(example, where, ignored_keys)
    prompt, completion = _value(row, "prompt", where), _value(row, key, where)
    if isinstance(completion, list):
        require_known(row, ("prompt", key, *CONTEXT_KEYS), where)
        before = conversation(prompt, where)
        after = without_prompt(conversation(completion, where), before)
        both = with_context([*before, *after], row, where)
        # Count from the end, because `with_context` may insert a system message.
        return _of_conversation(both, tokenizer, where, first=len(both.messages) - len(after))
    require_known(row, ("prompt", key), where)
    prompt, completion = _text(prompt, "prompt", where), _text(completion, key, where)
    return prompted(prompt, completion, tokenizer) if completion else None


def _of_conversation(
    conversation: Conversation, tokenizer: Tokenizer, where: str, first: int = 0
) -> Tokens | None:
    messages = conversation.messages[first:]
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if not messages or (answers and all(map(is_empty, answers))):
        return None
    return tokens_of(conversation, tokenizer, where, first=first)


def _value(example: Mapping[str, Any], key: str, where: str) -> Any:
    if example.get(key) is None:
        raise missing_key(key, example, where)
    return example[key]


def _text(value: Any, key: str, where: str) -> str:
    if isinstance(value, bytes):
        return decode_utf8(value, where)
    if isinstance(value, str):
        return require_valid_unicode(value, where, repr(key))
    raise BadExample(
        "missing_key",
        where,
        f"has {shortened(repr(value))} as {key!r}; expected a string",
        "Correct it, or set a different key.",
    )


def _of_ids(value: Any, key: str, vocab_size: int | None, where: str) -> Tokens | None:
    try:
        ids = np.asarray(value)
    except ValueError:  # Nested lists of different lengths.
        ids = np.empty((0, 0))
    if ids.shape == (0,):
        return None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadExample(
            "missing_key",
            where,
            f"has {shortened(repr(value))} as {key!r}; expected a list of ids",
            "Correct it, or set a different key.",
        )
    most = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    if ids.min() < 0 or ids.max() > most:
        wrong = ids[(ids < 0) | (ids > most)][0]
        raise BadExample(
            "id_beyond_vocabulary",
            where,
            f"has the id {wrong}; expected ids from 0 to {most}",
            "Tokenize it with the model's tokenizer.",
        )
    return Tokens(ids.astype(np.int32), np.ones(len(ids), bool))


def _check_masks(
    row: Mapping[str, Any], ids: np.ndarray, where: str, ignored_keys: Iterable[str]
) -> None:
    """Checks that a row does not exclude some of its ids, all of which are trained on."""
    for name in _MASKS:
        mask = row.get(name)
        included = ids if name == "labels" else np.ones(len(ids), bool)
        if mask is not None and name not in ignored_keys and not np.array_equal(mask, included):
            raise BadExample(
                "unknown_key",
                where,
                f"has the key {name!r}, which excludes some of its ids, but all ids are trained on",
                "Use the format 'completion' or 'messages', or remove the excluded tokens. To "
                f"train on all ids, pass ignored_keys=[{name!r}] to Documents.",
            )
