"""Tokenizes preference pairs in TRL's formats."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.core.errors import shortened
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
from praxis_lite.inputs.tokenizers.chat_messages import (
    ASSISTANT,
    USER,
    Message,
    is_empty,
    text_of,
)

_KEYS = ("prompt", "chosen", "rejected")


class Pair(NamedTuple):
    """A tokenized preference pair.

    Attributes:
      chosen: The prompt and the chosen answer.
      rejected: The prompt and the rejected answer.
    """

    chosen: Tokens
    rejected: Tokens


def pair_of(
    example: Mapping[str, Any], tokenizer: Tokenizer, where: str, ignored_keys: Iterable[str] = ()
) -> Pair | None:
    """Tokenizes a preference pair, or returns None if one of its answers is empty.

    The values of "prompt", "chosen" and "rejected" are strings or lists of messages. If "prompt" is
    missing, or is a string although the answers are complete conversations, the prompt consists of
    the messages that both answers start with, as in TRL's `maybe_extract_prompt`. Answers may
    repeat the last messages in the prompt. Rows with messages may also contain CONTEXT_KEYS.
    Assistant messages with weight 0 are excluded from the comparison.

    Args:
      example: A row of the dataset.
      tokenizer: Tokenizer, with a chat template if the row contains messages.
      where: Location of the row for error messages, as "file:line".
      ignored_keys: Keys of the row to ignore.

    Raises:
      BadExample: The row has another format or an unknown key, or the two answers are equal.
    """
    example = row_without_nulls(example, where, ignored_keys)
    prompt: Any = example.get("prompt")
    answers: list[Any] = [example.get("chosen"), example.get("rejected")]
    is_text = all(isinstance(answer, str) for answer in answers)
    is_valid = is_text or all(isinstance(answer, list) and answer for answer in answers)
    if not is_valid or not isinstance(prompt, str | list | None):
        names = [shortened(str(name), 40) for name in sorted(map(str, example))[:20]]
        raise BadExample(
            "missing_key",
            where,
            f"has the keys {names}; expected prompt, chosen and rejected, either all strings or "
            "all lists of messages, or only chosen and rejected as complete conversations",
            "Correct the example, or rename the keys with a transform of the source.",
        )
    if answers[0] == answers[1]:
        raise BadExample(
            "equal_answers",
            where,
            "has equal chosen and rejected answers",
            "Remove the pair.",
        )
    has_messages = not is_text or isinstance(prompt, list)
    require_known(example, (*_KEYS, *(CONTEXT_KEYS if has_messages else ())), where)
    if is_text and not isinstance(prompt, list):
        return _of_texts(prompt, answers, tokenizer)
    # Strings after a prompt of messages are assistant messages.
    if is_text:
        answers = [[{"role": ASSISTANT, "content": answer}] for answer in answers]
    answers = [conversation(answer, where) for answer in answers]
    before, answers = _split(prompt, answers, where)
    # An answer without any text has nothing to compare.
    for answer in answers:
        turns = [message for message in answer if message["role"] == ASSISTANT]
        if turns and all(map(is_empty, turns)):
            return None
    sides = [with_context([*before, *answer], example, where) for answer in answers]
    # Count from the end, because `with_context` may insert a system message.
    return Pair(
        *(
            tokens_of(side, tokenizer, where, first=len(side.messages) - len(answer))
            for side, answer in zip(sides, answers, strict=True)
        )
    )


def _split(
    prompt: Any, answers: list[list[Message]], where: str
) -> tuple[list[Message], list[list[Message]]]:
    """Splits two conversations into the messages in the prompt and in each answer."""
    if isinstance(prompt, list) and prompt:
        before = conversation(prompt, where)
        answers = [without_prompt(answer, before) for answer in answers]
        chosen, rejected = (answer[:1] for answer in answers)
        roles = [message["role"] for message in (*chosen, *rejected)]
        if "system" in roles or (USER in roles and chosen != rejected):
            raise BadExample(
                "missing_key",
                where,
                f"has answers that do not continue the prompt: they begin with the roles {roles}",
                "Begin both with the answer, or with the last messages in prompt.",
            )
    else:
        # Without messages in the prompt, the prompt is what both answers start with.
        count = _common_prefix_length(*answers)
        before, answers = answers[0][:count], [answer[count:] for answer in answers]
        if (
            not count
            and isinstance(prompt, str)
            and all(answer[0]["role"] == ASSISTANT for answer in answers)
        ):
            before = [{"role": USER, "content": prompt}]
        elif prompt and prompt.strip() not in [
            text_of(message.get("content")).strip() for message in before
        ]:
            raise BadExample(
                "unknown_key",
                where,
                "has a prompt that would be ignored, because it is not one "
                "of the messages that chosen and rejected start with",
                "Remove the prompt, or add it to the start of both answers.",
            )
    if not before:
        raise BadExample(
            "missing_key",
            where,
            "has no prompt, and its chosen and rejected conversations start with different "
            "messages",
            "Add a prompt, or start both conversations with the messages of the prompt.",
        )
    return before, answers


def without_prompt(answer: list[Message], prompt: Sequence[Message]) -> list[Message]:
    """Removes the last messages of a prompt from the start of an answer that repeats them."""
    sizes = range(min(len(answer), len(prompt)), 0, -1)
    count = next((n for n in sizes if answer[:n] == prompt[-n:]), 0)
    return answer[count:]


def _common_prefix_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Returns the length of the common prefix, which is shorter than both sequences."""
    shorter = min(len(chosen), len(rejected))
    both = enumerate(zip(chosen, rejected, strict=False))
    return next((i for i, (a, b) in both if a != b), max(shorter - 1, 0))


def _of_texts(prompt: str | None, answers: Sequence[str], tokenizer: Tokenizer) -> Pair | None:
    if prompt is None:
        count = _common_prefix_length(*answers)
        # The space before a word belongs to the answer, because a word's token includes the space.
        count -= count > 0 and answers[0][count - 1] == " "
        prompt, answers = answers[0][:count], [answer[count:] for answer in answers]
    if not all(answers):
        return None
    return Pair(*(prompted(prompt, answer, tokenizer) for answer in answers))


def prompted(prompt: str, answer: str, tokenizer: Tokenizer) -> Tokens:
    """Tokenizes a prompt and an answer; only the answer and its end token are trained on."""
    # Encode both as a single string, so that no tokenizer inserts a space between them.
    ids, offsets = tokenizer.encode_with_offsets(prompt + answer)
    started = tokenizer.with_start(ids)
    ended = tokenizer.with_end(started)
    # A token that spans both is part of the answer. Otherwise, the start of the answer would not be
    # trained on.
    is_answer = np.concatenate(
        [
            np.zeros(len(started) - len(ids), bool),
            offsets[:, 1] > len(prompt),
            np.ones(len(ended) - len(started), bool),
        ]
    )
    return Tokens(ended, is_answer)
