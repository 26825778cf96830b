"""Tokenizes conversations and marks the tokens in answers."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.texts import require_valid_unicode
from praxis_lite.inputs.text.messages import Conversation, errors_at
from praxis_lite.inputs.tokenizers.base import Tokenizer, no_chat_template
from praxis_lite.inputs.tokenizers.chat_messages import ASSISTANT, Message, as_messages, is_empty
from praxis_lite.inputs.tokenizers.chat_template import Answers


class Tokens(NamedTuple):
    """Token ids, and a mask of the ids that are training targets.

    Attributes:
      ids: int32[T].
      is_answer: bool[T], True for tokens to train on.
    """

    ids: np.ndarray
    is_answer: np.ndarray


def tokens_of(
    conversation: Conversation | Sequence[Message],
    tokenizer: Tokenizer,
    where: str,
    *,
    first: int = 0,
) -> Tokens:
    """Tokenizes a conversation and marks the tokens in answers, including end-of-turn tokens.

    The chat template marks answers with `{% generation %}` and `{% endgeneration %}`. If the
    template does not contain these tags, an answer is the text that a turn adds to the prompt.
    Messages with weight 0 are not trained on, nor are empty answers, which would teach the model to
    answer nothing.

    Args:
      conversation: The conversation, or its messages.
      tokenizer: Tokenizer with a chat template.
      where: Location of the conversation for error messages, as "file:line".
      first: Index of the first message to train on; answers before it are ignored.

    Raises:
      BadExample: The conversation contains no answer to train on or a key that the template does
        not read, or the template has no `{% generation %}` tag and renders a turn differently
        depending on later turns; or the text is not valid Unicode.
      ConfigError: The tokenizer has no chat template.
    """
    with errors_at(where):
        if not isinstance(conversation, Conversation):
            conversation = Conversation(as_messages(conversation))
        messages, variables = conversation.messages, conversation.variables
        answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not any(index >= first for index in answers):
            roles = sorted({str(message["role"]) for message in messages[first:]})
            raise BadExample(
                "no_answer",
                f"{where}:",
                "no message has the role 'assistant', so there is "
                f"nothing to train on; the roles are {roles}",
                "Set the role of the messages to train on to 'assistant'.",
            )
        learned = [
            index
            for index in answers
            if index >= first
            and messages[index].get("weight") != 0
            and not is_empty(messages[index])
        ]
        if not learned:
            raise BadExample(
                "no_answer",
                f"{where}:",
                "every assistant message is empty or is excluded by "
                "weight 0 or train false, so there is nothing to train on",
                "Remove the conversation.",
            )
        if tokenizer.chat is None:
            raise no_chat_template(tokenizer)
        chat = tokenizer.chat.chosen(variables)
        messages = chat.prepared(messages)
        if chat.marks_answers:
            marked = functools.partial(chat.answers, **variables)
            text, spans = chat.checked(messages, variables, marked, is_training=True)
            chosen = _chosen(messages, answers, learned, first, spans, marked, where)
        else:
            rendered = functools.partial(chat.render_data, **variables)
            text = chat.checked(messages, variables, rendered, is_training=True)
            chosen = [_span(messages, index, text, rendered, tokenizer, where) for index in learned]
    # Tools and arguments may be JSON strings, whose text is only validated here.
    ids, offsets = tokenizer.encode_with_offsets(require_valid_unicode(text, where))
    is_answer = np.zeros(len(ids), bool)
    for start, stop in chosen:
        # Include a token that starts with the space before the answer. Otherwise, the first word of
        # an answer would never be trained on.
        is_answer |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return Tokens(ids, is_answer)


def _chosen(
    messages: Sequence[Message],
    answers: Sequence[int],
    learned: Sequence[int],
    first: int,
    spans: Sequence[tuple[int, int]],
    marked: Callable[[Sequence[Message]], Answers],
    where: str,
) -> list[tuple[int, int]]:
    """Returns the character spans to train on."""
    if len(spans) == len(answers):
        return [span for span, index in zip(spans, answers, strict=True) if index in learned]
    if len(learned) == len(answers):
        return list(spans)
    # A template may mark several spans per answer, or messages with other roles. Render prefixes of
    # the conversation to find the message that adds each span.
    try:
        counts = [len(marked(messages[: index + 1]).spans) for index in range(len(messages))]
    except ConfigError:
        counts = []
    if sorted(counts) != counts or not counts or counts[-1] != len(spans):
        raise BadExample(
            "no_answer",
            f"{where}:",
            f"the chat template marks {len(spans)} spans as answers, but the conversation has "
            f"{len(answers)} answers, so the spans cannot be assigned to messages",
            "Enclose each answer once in {% generation %} and {% endgeneration %}.",
        )
    owners = np.searchsorted(counts, np.arange(len(spans)), side="right")
    # Messages with other roles are also trained on if the template marks them.
    skipped = set(answers) - set(learned)
    return [
        span
        for span, owner in zip(spans, owners, strict=True)
        if owner >= first and owner not in skipped
    ]


def _span(
    messages: Sequence[Message],
    index: int,
    text: str,
    rendered: Callable[..., str],
    tokenizer: Tokenizer,
    where: str,
) -> tuple[int, int]:
    """Returns the character span that a message adds to the prompt."""
    before, with_answer = rendered(messages[:index], True), rendered(messages[: index + 1])
    if not (with_answer.startswith(before) and text.startswith(with_answer)):
        raise BadExample(
            "no_answer",
            f"{where}:",
            f"the chat template of {tokenizer} renders message {index} differently if other "
            "messages follow it, so the tokens of this answer cannot be determined",
            "Enclose answers in {% generation %} and {% endgeneration %} in the template.",
        )
    # Whitespace between turns is not part of the answer.
    return len(before), len(with_answer.rstrip())
