"""What an example of text is for a language model: its ids, and which of them it has to learn."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from praxis_lite.errors import ConfigError, shown
from praxis_lite.inputs.sources.faults import BadExample, missing_key
from praxis_lite.inputs.text.conversations import Tokens, checked_messages, tokens_of
from praxis_lite.inputs.tokenizers import Tokenizer

# What an example may hold, and where, unless told otherwise.
KEYS = {"text": "text", "ids": "ids", "messages": "messages", "completion": "completion"}


def encoded(
    holds: str, key: str, example: Mapping[str, Any], tokenizer: Tokenizer, where: str
) -> Tokens:
    """Returns the ids of an example, with what begins and ends a text, and which are to be learnt.

    Args:
      holds: a key of KEYS: "text"; "ids", which stay as they are; "messages", a conversation, of
        which what the assistant says is learnt; "completion", of a "prompt", is learnt alone.
      where: for messages: "file:line".

    Raises:
      BadExample: the example lacks the key, holds something else there, or ids that are none.
    """
    value = _value(example, key, where)
    if holds == "ids":
        return _of_ids(value, key, tokenizer.vocab_size, where)
    if holds == "messages":
        try:
            return tokens_of(checked_messages(_plain(value), where), tokenizer, where)
        except BadExample:
            raise
        except ConfigError as error:
            raise BadExample("no_answer", where, "is no conversation", str(error)) from None
    text = _text(value, key, where)
    end = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    if holds == "completion":
        before = tokenizer.encode_prompt(_text(_value(example, "prompt", where), "prompt", where))
        after = np.array([*tokenizer.encode(text, False), *end], np.int32)
        ids = np.concatenate([before, after])
        return Tokens(ids, np.arange(len(ids)) >= len(before))
    ids = np.concatenate([
        np.array(tokenizer.document_start, np.int32), tokenizer.encode(text, False),
        np.array(end, np.int32),
    ])
    return Tokens(ids, np.ones(len(ids), bool))


def _value(example: Mapping[str, Any], key: str, where: str) -> Any:
    if example.get(key) is None:
        raise missing_key(key, example, where)
    return example[key]


def _text(value: Any, key: str, where: str) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if isinstance(text, str):
            text.encode()  # JSON may have halves of characters.
            return text
    except UnicodeError as error:
        raise BadExample(
            "not_utf8", where, f"has a {key!r} that is not UTF-8: {error}",
            "Write it in UTF-8.",
        ) from None
    raise BadExample(
        "missing_key", where, f"has {shown(repr(value))} as {key!r}; wanted is a text",
        "Mend it, or set key to another.",
    )


def _of_ids(value: Any, key: str, vocab_size: int | None, where: str) -> Tokens:
    ids = np.asarray(value)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BadExample(
            "missing_key", where, f"has {shown(repr(value))} as {key!r}; wanted is a list of ids",
            "Mend it, or set key to another.",
        )
    most = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    if ids.size and (ids.min() < 0 or ids.max() > most):
        wrong = ids[(ids < 0) | (ids > most)][0]
        raise BadExample(
            "id_beyond_vocabulary", where, f"has the id {wrong}; wanted are ids from 0 to {most}",
            "Tokenise it with the tokenizer of the model.",
        )
    return Tokens(ids.astype(np.int32), np.ones(len(ids), bool))


def _plain(value: Any) -> Any:
    """Returns messages as lists and dicts, whatever a file's format made of them."""
    return list(value) if isinstance(value, np.ndarray | tuple) else value
