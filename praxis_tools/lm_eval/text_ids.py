"""Tokenizes text in the same way as lm_eval's adapter for transformers (`hf`)."""

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.text.token_ids import checked_int
from praxis_lite.inputs.tokenizers.base import Tokenizer


class TextIds:
    """Encodes text as token ids, with or without a beginning-of-text token (BOS).

    Args:
      tokenizer: The model's tokenizer.
      add_bos_token: If True, BOS and no other special token is added to each text. If False, no
        special tokens are added. If None, the tokenizer adds its special tokens. BOS is not added
        to text that already begins with it, such as the output of a chat template.
      prefix_token_id: Id of the token that precedes a text without a context. The default is BOS,
        or the end-of-text token if the tokenizer has no BOS.

    Raises:
      ConfigError: An argument has the wrong type, or the tokenizer does not have the required
        token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ):
        require(
            add_bos_token in (True, False, None),
            "add_bos_token",
            add_bos_token,
            "True, False or None",
        )
        if add_bos_token and tokenizer.bos_id is None:
            raise ConfigError(
                f"add_bos_token=True requires a beginning-of-text token, but {tokenizer} has none. "
                "Set add_bos_token to False or None."
            )
        self.tokenizer, self._add_bos_token = tokenizer, add_bos_token
        self.prefix_id = _prefix_id(tokenizer, prefix_token_id)
        self._prefix_text = tokenizer.decode([self.prefix_id])

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the token ids of a text.

        Args:
          text: The text to encode.
          add_special_tokens: Whether to add special tokens. If None, they are added unless the text
            begins with the prefix token. If `add_bos_token` is False, they are never added.
        """
        if add_special_tokens is None:
            add_special_tokens = not self._prefix_text or not text.startswith(self._prefix_text)
        if not add_special_tokens or self._add_bos_token is False:
            return self.tokenizer.encode(text, False).tolist()
        if self._add_bos_token:
            return [self.tokenizer.bos_id, *self.tokenizer.encode(text, False).tolist()]
        return self.tokenizer.encode(text).tolist()


def _prefix_id(tokenizer: Tokenizer, prefix_token_id: int | None) -> int:
    if prefix_token_id is not None:
        vocab_size = tokenizer.vocab_size
        limits = (0,) if vocab_size is None else (0, vocab_size - 1)
        return checked_int(prefix_token_id, "prefix_token_id", *limits)
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    if tokenizer.eos_id is not None:
        return tokenizer.eos_id
    raise ConfigError(
        f"{tokenizer} has neither a beginning-of-text nor an end-of-text token to precede a text "
        "without a context. Set prefix_token_id=NUMBER."
    )
