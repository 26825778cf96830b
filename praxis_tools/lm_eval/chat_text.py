"""Conversations as texts, by the tokenizer's chat template."""

import logging
from collections.abc import Mapping, Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import as_messages, text_of
from praxis_lite.inputs.tokenizers.chat_template import RefusedConversation

# Follows the message to continue, to find its end in the text; as in transformers.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_log = logging.getLogger(__name__)


def chat_text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    """Returns a conversation's text.

    A template that refuses it is applied again without the system's messages; this is logged.

    Args:
      add_generation_prompt: True: an answer of the model comes next; False: the model continues the
        last message, which then has no end.

    Raises:
      ConfigError: there is no template, or it refuses the conversation or leaves out its end.
    """
    try:
        return _text(tokenizer, messages, add_generation_prompt)
    except RefusedConversation as error:
        others = [message for message in messages if message["role"] != "system"]
        if len(others) == len(messages):
            raise
        _log.warning("%s The system's messages are left out.", error)
        return _text(tokenizer, others, add_generation_prompt)


def _text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    if add_generation_prompt:
        return tokenizer.apply_chat_template(messages, True, tokenize=False)
    *before, last = as_messages(messages) or [{"role": "", "content": ""}]
    tagged = [*before, {**last, "content": text_of(last.get("content")) + _TAG}]
    text = tokenizer.apply_chat_template(tagged, False, tokenize=False)
    begin, tag, rest = text.rpartition(_TAG.strip())
    if not tag:
        raise ConfigError(
            f"The chat template of {tokenizer} leaves out the end of the last message, so that the "
            "model cannot continue it. Fix the template, or run the task without it."
        )
    # A template that trims messages has trimmed the tag's blank too.
    return begin if rest.startswith(" ") else begin.rstrip()
