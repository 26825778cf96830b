"""Tokens that a chat template writes behind an answer, with which a trained model ends its turn."""

import re
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError

if TYPE_CHECKING:
    from praxis_lite.inputs.tokenizers.base import Tokenizer

# An answer that no template has in it.
_ANSWER = "praxislite"
_MARK = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")


def turn_end_ids(tokenizer: "Tokenizer") -> tuple[int, ...]:
    """Returns the token with which the template ends an answer; () if it writes none, or is none.

    That is the first thing behind the answer, if it is one token by itself: <|im_end|>, </s>.
    """
    if tokenizer.chat is None:
        return ()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.chat.render(messages)
    except ConfigError:
        return ()  # Said where a conversation is to be read.
    mark = _MARK.match(text.rpartition(_ANSWER)[2]) if _ANSWER in text else None
    if mark is None:
        return ()
    ids = tokenizer.encode(mark[1], False).tolist()
    return tuple(ids) if len(ids) == 1 else ()
