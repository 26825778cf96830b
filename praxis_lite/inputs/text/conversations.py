"""Which tokens of a conversation are the answers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.text.messages import ASSISTANT, Message, is_empty
from praxis_lite.inputs.tokenizers.base import Tokenizer


class Tokens(NamedTuple):
    """A conversation's ids int32[T], and which of them are the model's to write, bool[T]."""

    ids: np.ndarray
    is_answer: np.ndarray


def tokens_of(
    messages: Sequence[Message], tokenizer: Tokenizer, where: str, *, first: int = 0
) -> Tokens:
    """Returns a conversation's tokens, and which are of the assistant, its turns' ends included.

    What the chat template puts between `{% generation %}` and `{% endgeneration %}` is the
    assistant's. If it has no such words: what a turn adds to the prompt for it. An empty answer
    does not count: it would teach to say nothing.

    Args:
      where: "file:line", for messages.
      first: only answers from this message on count.

    Raises:
      BadExample: no message is the assistant's; the template writes a turn otherwise once others
        follow, and has no `{% generation %}`.
      ConfigError: there is no template, or it refuses the conversation.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not any(index >= first for index in answers):
        roles = sorted({str(item["role"]) for item in messages[first:]})
        raise BadExample(
            "no_answer", f"{where}:", "no message has the role assistant, so nothing is to learn; "
            f"its roles are {roles}", "Give what the model is to say the role assistant.",
        )
    text, spans = _answers(messages, answers, tokenizer, where)
    ids, places = tokenizer.encode_with_places(text)
    is_answer = np.zeros(len(ids), bool)
    if len(spans) == len(answers):
        chosen = [
            span for span, index in zip(spans, answers, strict=True)
            if index >= first and not is_empty(messages[index])
        ]
    else:  # A template may mark what others say, too.
        chosen = spans[sum(index < first for index in answers) :]
    for start, stop in chosen:
        # A token of the blank before an answer and of its first word is the answer's: that word
        # would else never be learnt.
        is_answer |= (places[:, 0] < stop) & (places[:, 1] > start)
    return Tokens(ids, is_answer)


def _answers(
    messages: Sequence[Message], answers: Sequence[int], tokenizer: Tokenizer, where: str
) -> tuple[str, list[tuple[int, int]]]:
    """Returns the conversation's text, and the characters of its answers."""
    if tokenizer.chat is not None and tokenizer.chat.marks_answers:
        return tokenizer.chat.answers(messages)

    def rendered(count: int, asks: bool = False) -> str:
        if tokenizer.chat is None:
            return tokenizer.apply_chat_template(messages[:count], asks, tokenize=False)
        return tokenizer.chat.render_data(messages[:count], asks)

    text, spans = rendered(len(messages)), []
    for index in answers:
        before, with_answer = rendered(index, True), rendered(index + 1)
        if not (with_answer.startswith(before) and text.startswith(with_answer)):
            raise BadExample(
                "no_answer", f"{where}:",
                f"the chat template of {tokenizer} writes message {index} otherwise once others "
                "follow it, so which tokens are its answer cannot be told",
                "Put {% generation %} and {% endgeneration %} around an answer in the template.",
            )
        # What stands between turns is not the model's.
        spans.append((len(before), len(with_answer.rstrip())))
    return text, spans
