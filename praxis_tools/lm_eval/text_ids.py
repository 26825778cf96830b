"""Texts as ids by the rules of lm_eval's adapter of transformers (`hf`)."""

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.text.token_ids import whole_number
from praxis_lite.inputs.tokenizers.base import Tokenizer


class TextIds:
    """The ids of texts, with or without a beginning.

    Args:
      tokenizer: of the model.
      add_bos_token: True: each text begins with the tokenizer's beginning of a text and has no
        other special tokens around it; False: it has none at all; None: as the tokenizer does. A
        text that has the beginning already, as chat templates write it, gets no other.
      prefix_token_id: the id before a text that has no context; None: the tokenizer's beginning of
        a text, or without any its end of a text.

    Raises:
      ConfigError: an argument has another type, or the tokenizer has no such token.
    """

    def __init__(
        self, tokenizer: Tokenizer, add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ):
        require(
            add_bos_token in (True, False, None), "add_bos_token", add_bos_token,
            "True, False or None",
        )
        require(
            not add_bos_token or tokenizer.bos_id is not None,
            f"add_bos_token, for {tokenizer}, which has no beginning of a text,", add_bos_token,
            "False or None",
        )
        self.tokenizer, self._add_bos_token = tokenizer, add_bos_token
        self.prefix_id = _prefix_id(tokenizer, prefix_token_id)
        self._prefix_text = tokenizer.decode([self.prefix_id])

    def of(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the ids of a text.

        Args:
          add_special_tokens: True or False, in place of the rules of the class; None: by them.
        """
        adds = add_special_tokens
        if adds is None:
            adds = not self._prefix_text or not text.startswith(self._prefix_text)
        if not adds or self._add_bos_token is False:
            return self.tokenizer.encode(text, False).tolist()
        if self._add_bos_token:
            return [self.tokenizer.bos_id, *self.tokenizer.encode(text, False).tolist()]
        return self.tokenizer.encode(text).tolist()


def _prefix_id(tokenizer: Tokenizer, given: int | None) -> int:
    if given is not None:
        most = tokenizer.vocab_size
        return whole_number(given, "prefix_token_id", 0, *([] if most is None else [most - 1]))
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    if tokenizer.eos_id is not None:
        return tokenizer.eos_id
    raise ConfigError(
        f"{tokenizer} has neither a beginning nor an end of a text, one of which must precede a "
        "text without context. Set prefix_token_id=NUMBER."
    )
