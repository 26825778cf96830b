"""Questions about Python with answers, out of what comes with Python."""

from collections.abc import Iterator
from typing import Any

from praxis_lite.inputs.text.corpus import language_reference
from praxis_lite.inputs.tokenizers.chat_messages import ASSISTANT, USER


def about_python(folder: str = "") -> Iterator[dict[str, Any]]:
    """Yields questions about Python, answered by its language reference, each with a wrong answer.

    A wrong answer is right for the question before. As `make` of a source it writes them.
    """
    last = None
    for name, text in language_reference():
        paragraphs = [" ".join(word.split()) for word in text.decode().split("\n\n")]
        plain = (item for item in paragraphs if item[:1].isalpha() and item.endswith("."))
        answer = next((element for element in plain if len(element) < 400), None)
        if answer is None:
            continue
        if last is not None:
            question = {"role": USER, "content": f"What does Python's reference say of {name}?"}
            right, wrong = ({"role": ASSISTANT, "content": one} for one in (answer, last))
            yield {
                "messages": [question, right], "chosen": [question, right],
                "rejected": [question, wrong],
            }
        last = answer
