"""Renders conversations as text with the tokenizer's chat template."""

import logging
from collections.abc import Mapping, Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import as_messages, text_of
from praxis_lite.inputs.tokenizers.chat_template import RefusedConversation

# Appended to the message to continue, so that its end can be found in the rendered text. This is
# the tag that transformers uses.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_log = logging.getLogger(__name__)


def chat_text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    """Returns a conversation rendered by the tokenizer's chat template.

    If the template refuses the conversation, it is applied again without the system messages, with
    a warning.

    Args:
      tokenizer: Tokenizer with a chat template.
      messages: Messages with "role" and "content".
      add_generation_prompt: Whether the text ends with the header of the model's next message. If
        False, it ends within the last message, so that the model continues that message.


    Raises:
      ConfigError: The tokenizer has no template, or the template refuses the conversation or omits
        the end of the last message.
    """
    try:
        return _render(tokenizer, messages, add_generation_prompt)
    except RefusedConversation as error:
        without_system = [message for message in messages if message["role"] != "system"]
        if len(without_system) == len(messages):
            raise
        _log.warning("%s The system messages are left out.", error)
        return _render(tokenizer, without_system, add_generation_prompt)


def _render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    if add_generation_prompt:
        return tokenizer.apply_chat_template(messages, True, tokenize=False)
    *before, last = as_messages(messages) or [{"role": "", "content": ""}]
    tagged = [*before, {**last, "content": text_of(last.get("content")) + _TAG}]
    text = tokenizer.apply_chat_template(tagged, False, tokenize=False)
    before_tag, tag, after_tag = text.rpartition(_TAG.strip())
    if not tag:
        raise ConfigError(
            f"The chat template of {tokenizer} leaves out the end of the last message, so that the "
            "model cannot continue it. Fix the template, or run the task without it."
        )
    # If the template trimmed the tag's trailing space, it trims every message: do the same here.
    return before_tag if after_tag.startswith(" ") else before_tag.rstrip()
