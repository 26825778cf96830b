"""Files of JSON lines with conversations, and which tokens of one are the answers."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.errors import ConfigError, shown
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.paths import matching_files
from praxis_lite.inputs.sources.json_lines import DAMAGED, opened_lines, parsed
from praxis_lite.inputs.text.corpus import language_reference
from praxis_lite.inputs.tokenizers import Tokenizer

ASSISTANT = "assistant"
Message = Mapping[str, Any]


class Line(NamedTuple):
    """A line of a file: what it holds, and "file:number" for messages."""

    content: Mapping[str, Any]
    where: str


class Tokens(NamedTuple):
    """A conversation's ids int32[T], and which of them are the model's to write, bool[T]."""

    ids: np.ndarray
    is_answer: np.ndarray


def read_lines(files: str | None) -> Iterator[Line]:
    """Yields the objects of JSON lines, plain, .gz or .zst, in the order of the files' names.

    Args:
      files: globs, separated by commas; None: what `about_python` yields.

    Raises:
      ConfigError: no file matches; a file cannot be read; a line is no object. Names the line.
    """
    if files is None:
        yield from about_python()
        return
    for path in matching_files(files, "The data"):
        try:
            with opened_lines(path) as lines:
                for number, line in enumerate(lines, 1):
                    if not line.isspace():
                        where = f"{path}:{number}"
                        yield Line(parsed(line, where), where)
        except BadExample as error:
            raise ConfigError(error.without_skip) from None
        except DAMAGED as error:
            raise ConfigError(f"The file {path} cannot be read: {error}.") from error


def about_python() -> Iterator[Line]:
    """Yields questions about Python, answered by its language reference, each with a wrong answer.

    A wrong answer is right for the question before.
    """
    last = None
    for name, text in language_reference():
        paragraphs = [" ".join(one.split()) for one in text.decode().split("\n\n")]
        plain = (one for one in paragraphs if one[:1].isalpha() and one.endswith("."))
        answer = next((one for one in plain if len(one) < 400), None)
        if answer is None:
            continue
        if last is not None:
            question = {"role": "user", "content": f"What does Python's reference say of {name}?"}
            right, wrong = ({"role": ASSISTANT, "content": one} for one in (answer, last))
            yield Line(
                {"messages": [question, right], "chosen": [question, right],
                 "rejected": [question, wrong]}, f"the language reference, {name}",
            )
        last = answer


def is_held_out(content: Mapping[str, Any], percent: int) -> bool:
    """Returns whether a line is held out, by its content alone, so that others may come and go."""
    text = json.dumps(content, sort_keys=True).encode()
    return int(hashlib.sha256(text).hexdigest(), 16) % 100 < percent


def checked_messages(messages: Any, where: str) -> Sequence[Message]:
    """Returns a conversation.

    Raises:
      ConfigError: it is no list of messages with a role and a content; names the line.
    """
    is_right = isinstance(messages, list) and messages and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
        for one in messages
    )
    if not is_right:
        raise ConfigError(
            f'{where}: messages are {shown(json.dumps(messages))}; wanted is a list of {{"role": '
            '"user", "content": ...}, with the roles system, user and assistant as a rule.'
        )
    return messages


def tokens_of(
    messages: Sequence[Message], tokenizer: Tokenizer, where: str, *, first: int = 0
) -> Tokens:
    """Returns a conversation's tokens, and which are of the assistant, its turns' ends included.

    What the chat template puts between `{% generation %}` and `{% endgeneration %}` is the
    assistant's. If it has no such words: what a turn adds to the prompt for it.

    Args:
      where: "file:line", for messages.
      first: only answers from this message on count.

    Raises:
      ConfigError: no message is the assistant's; the template writes a turn otherwise once others
        follow, and has no `{% generation %}`.
    """
    num_before = sum(one["role"] == ASSISTANT for one in messages[:first])
    if not any(one["role"] == ASSISTANT for one in messages[first:]):
        raise ConfigError(f"{where}: no message has the role assistant, so nothing is to learn.")
    text, spans = _answers(messages, tokenizer, where)
    ids, places = tokenizer.encode_with_places(text)
    is_answer = np.zeros(len(ids), bool)
    for start, stop in spans[num_before:]:
        # A token of the blank before an answer and of its first word is the answer's: that word
        # would else never be learnt.
        is_answer |= (places[:, 0] < stop) & (places[:, 1] > start)
    return Tokens(ids, is_answer)


def _answers(
    messages: Sequence[Message], tokenizer: Tokenizer, where: str
) -> tuple[str, list[tuple[int, int]]]:
    if tokenizer.chat is not None and tokenizer.chat.marks_answers:
        return tokenizer.chat.answers(messages)

    def rendered(count: int, asks: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:count], asks, tokenize=False)

    text, spans = rendered(len(messages)), []
    for index, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before, with_answer = rendered(index, True), rendered(index + 1)
            if not (with_answer.startswith(before) and text.startswith(with_answer)):
                raise ConfigError(
                    f"{where}: the chat template of {tokenizer} writes message {index} otherwise "
                    "once others follow it, so which tokens are its answer cannot be told. Put "
                    "{% generation %} and {% endgeneration %} around an answer in the template."
                )
            # What stands between turns is not the model's.
            spans.append((len(before), len(with_answer.rstrip())))
    return text, spans
