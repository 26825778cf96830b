"""Tokens of a conversation, and which of them belong to the answers."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.text.messages import Conversation, errors_at
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import ASSISTANT, Message, as_messages, is_empty
from praxis_lite.inputs.tokenizers.chat_template import Answers


class Tokens(NamedTuple):
    """A conversation's ids int32[T], and which of them are trained on, bool[T]."""

    ids: np.ndarray
    is_answer: np.ndarray


def tokens_of(
    conversation: Conversation | Sequence[Message], tokenizer: Tokenizer, where: str, *,
    first: int = 0,
) -> Tokens:
    """Returns a conversation's tokens, and which are answers, including the ends of turns.

    Answers are between `{% generation %}` and `{% endgeneration %}` in the chat template. Without
    these tags, an answer is the text that a turn adds to its prompt. Empty answers, which would
    train to say nothing, and messages with weight 0 do not count.

    Args:
      where: "file:line", for messages.
      first: only answers from this message on count.

    Raises:
      BadExample: there is no answer to train on; the template renders a turn differently once
        others follow, and has no `{% generation %}`; or there is a key that it does not read.
      ConfigError: there is no template.
    """
    with errors_at(where):
        if not isinstance(conversation, Conversation):
            conversation = Conversation(as_messages(conversation))
        messages, variables = conversation.messages, conversation.variables
        answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not any(index >= first for index in answers):
            roles = sorted({str(item["role"]) for item in messages[first:]})
            raise BadExample(
                "no_answer", f"{where}:", "no message has the role assistant, so there is nothing "
                f"to train on; the roles are {roles}",
                "Give the messages that the model should write the role assistant.",
            )
        learned = [
            index for index in answers
            if index >= first and messages[index].get("weight") != 0
            and not is_empty(messages[index])
        ]
        if not learned:
            raise BadExample(
                "no_answer", f"{where}:", "every message of the assistant has weight 0 or train "
                "false, or is empty, so there is nothing to train on",
                "Leave the conversation out.",
            )
        if tokenizer.chat is None:
            tokenizer.apply_chat_template(messages)  # Raises that there is no template.
        chat = tokenizer.chat.chosen(variables)
        messages = chat.prepared(messages)
        if chat.marks_answers:
            marked = functools.partial(chat.answers, **variables)
            text, spans = chat.checked(messages, variables, marked)
            chosen = _chosen(messages, answers, learned, first, spans, marked, where)
        else:
            rendered = functools.partial(chat.render_data, **variables)
            text = chat.checked(messages, variables, rendered)
            chosen = [_span(messages, index, text, rendered, tokenizer, where) for index in learned]
    ids, offsets = tokenizer.encode_with_places(text)
    is_answer = np.zeros(len(ids), bool)
    for start, stop in chosen:
        # A token that includes the blank before an answer counts, or its first word would never be
        # trained on.
        is_answer |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return Tokens(ids, is_answer)


def _chosen(
    messages: Sequence[Message], answers: Sequence[int], learned: Sequence[int], first: int,
    spans: Sequence[tuple[int, int]], marked: Callable[[Sequence[Message]], Answers], where: str,
) -> list[tuple[int, int]]:
    """Returns the character spans of the messages that get a loss."""
    if len(spans) == len(answers):
        return [span for span, index in zip(spans, answers, strict=True) if index in learned]
    if len(learned) == len(answers):
        return list(spans)
    # A template may mark several parts of an answer, or other roles' messages: each message has the
    # spans that it adds to those before it.
    try:
        counts = [len(marked(messages[: index + 1]).spans) for index in range(len(messages))]
    except ConfigError:
        counts = []
    if sorted(counts) != counts or not counts or counts[-1] != len(spans):
        raise BadExample(
            "no_answer", f"{where}:", f"the chat template marks {len(spans)} answers of a "
            f"conversation with {len(answers)}, so it is unclear which are which",
            "Put {% generation %} and {% endgeneration %} once around each answer.",
        )
    owners = np.searchsorted(counts, np.arange(len(spans)), side="right")
    # Other roles' messages are trained on if the template marks them.
    skipped = set(answers) - set(learned)
    return [
        span for span, owner in zip(spans, owners, strict=True)
        if owner >= first and owner not in skipped
    ]


def _span(
    messages: Sequence[Message], index: int, text: str, rendered: Callable[..., str],
    tokenizer: Tokenizer, where: str,
) -> tuple[int, int]:
    """Returns the characters that a message adds to the prompt for it."""
    before, with_answer = rendered(messages[:index], True), rendered(messages[: index + 1])
    if not (with_answer.startswith(before) and text.startswith(with_answer)):
        raise BadExample(
            "no_answer", f"{where}:",
            f"the chat template of {tokenizer} renders message {index} differently once others "
            "follow it, so the tokens of its answer are unknown",
            "Put {% generation %} and {% endgeneration %} around an answer in the template.",
        )
    # Whitespace between turns is not part of the answer.
    return len(before), len(with_answer.rstrip())
