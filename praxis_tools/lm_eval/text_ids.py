"""Tokenizes text by the rules of lm_eval's adapter for transformers (`hf`)."""

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.text.token_ids import whole_number
from praxis_lite.inputs.tokenizers.base import Tokenizer


class TextIds:
    """Encodes text as token ids, with or without a beginning-of-text token (BOS).

    Args:
      tokenizer: The model's tokenizer.
      add_bos_token: If True, each text gets BOS and no other special token; if False, none at all;
        if None, the special tokens that the tokenizer adds. Text that already begins with BOS,
        such as the output of a chat template, gets no second one.
      prefix_token_id: Id of the token that precedes a text without a context. By default BOS, or
        the end-of-text token if the tokenizer has no BOS.

    Raises:
      ConfigError: An argument has the wrong type, or the tokenizer lacks the token.
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
            f"add_bos_token, for {tokenizer}, which has no beginning-of-text token,", add_bos_token,
            "False or None",
        )
        self.tokenizer, self._add_bos_token = tokenizer, add_bos_token
        self.prefix_id = _prefix_id(tokenizer, prefix_token_id)
        self._prefix_text = tokenizer.decode([self.prefix_id])

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the token ids of a text.

        Args:
          text: The text to encode.
          add_special_tokens: Whether special tokens are added; None adds them unless the text
            begins with the prefix token. `add_bos_token=False` overrides True.
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
        return whole_number(prefix_token_id, "prefix_token_id", *limits)
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    if tokenizer.eos_id is not None:
        return tokenizer.eos_id
    raise ConfigError(
        f"{tokenizer} has neither a beginning-of-text nor an end-of-text token to precede a text "
        "without a context. Set prefix_token_id=NUMBER."
    )
