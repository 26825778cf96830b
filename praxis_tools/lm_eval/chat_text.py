"""Renders conversations as text with the tokenizer's chat template."""

import logging
from collections.abc import Mapping, Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_messages import (
    RefusedConversation,
    ReservedText,
    as_messages,
    text_of,
)

# Appended to the message to continue, so that the message's end can be found in the rendered text;
# transformers uses the same tag.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_log = logging.getLogger(__name__)


def chat_text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    """Renders a conversation with the tokenizer's chat template.

    If the template rejects the conversation, a warning is logged and the template is applied again
    without system messages.

    Args:
      tokenizer: Tokenizer with a chat template.
      messages: Messages with "role" and "content".
      add_generation_prompt: Whether the text ends with the header of the model's next message. If
        False, the text ends within the last message, so that the model continues that message.

    Raises:
      ConfigError: The tokenizer has no template, or the template rejects the conversation or omits
        the end of the last message.
    """
    try:
        return _render(tokenizer, messages, add_generation_prompt)
    except RefusedConversation as error:
        without_system = [message for message in messages if message["role"] != "system"]
        if len(without_system) == len(messages):
            raise
        _log.warning("%s The system messages are omitted.", error)
        return _render(tokenizer, without_system, add_generation_prompt)


def _render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    if add_generation_prompt:
        return _rendered(tokenizer, messages, True)
    *before, last = as_messages(messages) or [{"role": "", "content": ""}]
    tagged = [*before, {**last, "content": text_of(last.get("content")) + _TAG}]
    text = _rendered(tokenizer, tagged, False)
    before_tag, tag, after_tag = text.rpartition(_TAG.strip())
    if not tag:
        raise ConfigError(
            f"The chat template of {tokenizer} omits the end of the last message, so the model "
            "cannot continue it. Fix the template, or run the task without it."
        )
    # If the template trimmed the tag's trailing space, it trims every message, so do the same here.
    return before_tag if after_tag.startswith(" ") else before_tag.rstrip()


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt, tokenize=False)
    except ReservedText as error:
        # Scores must be comparable with those of lm_eval's adapter for transformers.
        _log.warning("%s It is read as the special token, as lm_eval does.", error)
        chat = tokenizer.chat
        assert chat is not None, "apply_chat_template has used it."
        return chat.render(chat.prepared(messages), add_generation_prompt)
