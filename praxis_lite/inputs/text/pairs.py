"""Tokens of preference pairs in TRL's formats."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.core.errors import shown
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.text.conversations import Tokens, tokens_of
from praxis_lite.inputs.text.messages import (
    CONTEXT_KEYS,
    conversation,
    require_known,
    row_without_nulls,
    with_context,
)
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import ASSISTANT, USER, is_empty, text_of

_KEYS = ("prompt", "chosen", "rejected")


class Pair(NamedTuple):
    """The prompt with the preferred answer, and with the rejected answer."""

    chosen: Tokens
    rejected: Tokens


def pair_of(
    example: Mapping[str, Any], tokenizer: Tokenizer, where: str, ignored_keys: Iterable[str] = ()
) -> Pair | None:
    """Returns the pair of {"prompt", "chosen", "rejected"}, or None if an answer is empty.

    Each is a text or a list of messages. Without a prompt, or with a text next to complete
    conversations, the prompt is the common start of both answers (TRL's `maybe_extract_prompt`).
    If both answers begin with the prompt's messages, these count once. Rows of messages may have
    CONTEXT_KEYS; messages of an answer with weight 0 are not compared.

    Raises:
      BadExample: it has another form or an unknown key, or the answers are equal.
    """
    example = row_without_nulls(example, where, ignored_keys)
    prompt, *answers = map(example.get, _KEYS)
    is_text = all(isinstance(answer, str) for answer in answers)
    is_right = is_text or all(isinstance(item, list) and item for item in answers)
    if not is_right or not isinstance(prompt, str | list | None):
        names = [shown(str(name), 40) for name in sorted(map(str, example))[:20]]
        raise BadExample(
            "missing_key", where,
            f"has {names}; expected prompt, chosen and rejected, all of them texts or all of them "
            "lists of messages, or chosen and rejected conversations",
            "Correct it, or rename the keys with a transform of the source.",
        )
    if answers[0] == answers[1]:
        raise BadExample(
            "equal_answers", where, "has the same answer as chosen and as rejected",
            "Leave the pair out.",
        )
    has_messages = not is_text or isinstance(prompt, list)
    require_known(example, (*_KEYS, *(CONTEXT_KEYS if has_messages else ())), where)
    if not has_messages:
        return _of_texts(prompt, answers, tokenizer)
    if is_text:
        answers = [[{"role": ASSISTANT, "content": answer}] for answer in answers]
    answers = [conversation(answer, where) for answer in answers]
    before, answers = _split(prompt, answers, where)
    for answer in answers:
        turns = [message for message in answer if message["role"] == ASSISTANT]
        if turns and all(map(is_empty, turns)):
            return None
    sides = [with_context([*before, *answer], example, where) for answer in answers]
    return Pair(*(
        tokens_of(side, tokenizer, where, first=len(side.messages) - len(answer))
        for side, answer in zip(sides, answers, strict=True)
    ))


def _split(
    prompt: Any, answers: Sequence[list[Any]], where: str
) -> tuple[list[Any], list[list[Any]]]:
    """Returns the messages of the prompt, and those of each answer."""
    if isinstance(prompt, list) and prompt:
        before = conversation(prompt, where)
        if all(answer[: len(before)] == before for answer in answers):
            answers = [answer[len(before) :] for answer in answers]
    else:
        count = _num_alike(*answers)
        before, answers = answers[0][:count], [answer[count:] for answer in answers]
        if not count and isinstance(prompt, str) and all(
            answer[0]["role"] == ASSISTANT for answer in answers
        ):
            before = [{"role": USER, "content": prompt}]
        elif prompt and prompt.strip() not in [
            text_of(message.get("content")).strip() for message in before
        ]:
            raise BadExample(
                "unknown_key", where, "has a prompt that is not among the messages at the start of "
                "chosen and rejected, so it would not be read",
                "Remove it, or put it before both.",
            )
    if not before:
        raise BadExample(
            "missing_key", where,
            "has a chosen and a rejected conversation that do not begin alike, and no prompt",
            "Give the same messages before both answers, or as prompt.",
        )
    return before, answers


def _num_alike(chosen: Any, rejected: Any) -> int:
    """Returns the length of the common start of two answers, at most all but the last item."""
    shorter = min(len(chosen), len(rejected))
    both = enumerate(zip(chosen, rejected, strict=False))
    return next((i for i, (a, b) in both if a != b), max(shorter - 1, 0))


def _of_texts(prompt: str | None, answers: Sequence[str], tokenizer: Tokenizer) -> Pair | None:
    if prompt is None:
        count = _num_alike(*answers)
        # The blank before a word belongs to the word, as in its token.
        count -= count > 0 and answers[0][count - 1] == " "
        prompt, answers = answers[0][:count], [answer[count:] for answer in answers]
    if not all(answers):
        return None
    return Pair(*(prompted(prompt, answer, tokenizer) for answer in answers))


def prompted(prompt: str, answer: str, tokenizer: Tokenizer) -> Tokens:
    """Returns a prompt and an answer with its end token; only answer and end are trained on."""
    # Encode them as one text, so that no tokenizer puts a space between them.
    ids, offsets = tokenizer.encode_with_places(prompt + answer)
    started = tokenizer.with_start(ids)
    ended = tokenizer.with_end(started)
    # A token with characters of both counts as the answer's, or its start would not be trained on.
    is_answer = np.concatenate([
        np.zeros(len(started) - len(ids), bool), offsets[:, 1] > len(prompt),
        np.ones(len(ended) - len(started), bool),
    ])
    return Tokens(ended, is_answer)
