"""The tokenizer interface: encoding, decoding, and special tokens."""

import abc
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate

# An answer that does not occur in any template, and the pattern of an end-of-turn token that is not
# marked as special.
_ANSWER = "praxislite"
_MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class Tokenizer(abc.ABC):
    """Converts text to token ids and back.

    Derive custom tokenizers from this class: corpora, pipelines and tasks use a tokenizer only
    through this interface.

    Attributes:
      token_unit: The unit of text that an id represents, "byte", "character" or "token". It appears
        in the name of the metric bits_per_<unit>.
      vocab_size: All ids, including those of special tokens, are below this number. None if any
        number is a valid id.
      eos_id: Id of the end-of-text token, or None.
      eos_ids: Ids that end a model's output: eos_id, `model_eos_ids` and `turn_end_ids`.
      model_eos_ids: EOS ids listed in generation_config.json, or else in config.json.
      turn_end: Name of the end-of-turn token that the chat template writes after an answer, such as
        "<|im_end|>" or "</s>"; "" if there is none.
      turn_end_ids: The id of `turn_end`; () if there is none, or if it is several tokens.
      bos_id: Id of the beginning-of-text token, or None.
      pad_id: Id of the padding token, or None.
      special_ids: Ids of the special tokens, which `decode` omits if skip_special_tokens is True.
      begin_ids: Ids of the special tokens that `encode` adds before a text.
      end_ids: Ids of the special tokens that `encode` adds after a text.
      document_start: Ids that precede each document and each prompt.
      document_end: Ids that follow each document.
      chat: The chat template, or None.
      path: Directory of the tokenizer's files, or None.
    """

    token_unit: str = "token"
    vocab_size: int | None = None
    eos_id: int | None = None
    model_eos_ids: Sequence[int] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    special_ids: frozenset[int] = frozenset()
    begin_ids: Sequence[int] = ()
    end_ids: Sequence[int] = ()
    chat: ChatTemplate | None = None
    path: str | os.PathLike[str] | None = None

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Encodes a text as int32[num_tokens], by default with `begin_ids` and `end_ids`."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Decodes ids to text, with or without the text of special tokens."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that affect token ids, as JSON; equal for equal tokenizers."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        local = () if self.eos_id is None else (self.eos_id,)
        return tuple(dict.fromkeys((*local, *self.model_eos_ids, *self.turn_end_ids)))

    @functools.cached_property
    def turn_end(self) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = "" if self.chat is None else self.chat.render(self.chat.prepared(messages))
        except ConfigError:
            return ""  # The error is reported when a conversation is rendered.
        if self.chat is None or _ANSWER not in text:
            return ""
        end = text.rpartition(_ANSWER)[2].lstrip()
        marks = [name for name in self.chat.reserved if end.startswith(name)]
        if match := _MARK.match(end):
            marks.append(match[0])
        return max(marks, key=len, default="")

    @functools.cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        ids = self.encode(self.turn_end, False).tolist() if self.turn_end else []
        return tuple(ids) if len(ids) == 1 else ()

    def name_of(self, token: int) -> str | None:
        """Returns a token's vocabulary entry, such as "<0xE2>" for a byte; None if unknown."""
        return None

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a text without special tokens, and returns the character span of each token.

        Returns:
          A tuple (ids, offsets): int32[num_tokens], and int64[num_tokens, 2] with the index of each
          token's first character and the index after its last character. If several tokens encode
          parts of a character, the spans of all these tokens include the character.

        Raises:
          ConfigError: The tokenizer cannot compute character spans.
        """
        raise ConfigError(f"{self} cannot compute the character spans of tokens.")

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes each text without special tokens.

        Bytes that are not valid UTF-8, such as an incomplete character at the end of a truncated
        file, are replaced by U+FFFD.
        """
        return [self.encode(text.decode(errors="replace"), False) for text in texts]

    def cut(self, text: bytes, length: int) -> bytes:
        """Truncates a UTF-8 text to at most `length` bytes, at a character boundary."""
        return text[:length].decode(errors="ignore").encode()

    # The following methods determine the start and end tokens of prompts, documents and answers. By
    # default, these are the special tokens that transformers adds: `begin_ids` and `end_ids`.

    @property
    def document_start(self) -> tuple[int, ...]:
        """The ids that precede a prompt or a document: `begin_ids` unless overridden.

        The tuple is empty for most models without a BOS token, such as Qwen and GPT-2.
        """
        return tuple(self.begin_ids)

    @property
    def document_end(self) -> tuple[int, ...]:
        """The ids that follow a document: the EOS token if there is one, otherwise `end_ids`."""
        return tuple(self.end_ids) if self.eos_id is None else (self.eos_id,)

    def with_start(self, ids: np.ndarray) -> np.ndarray:
        """Adds `document_start` before the ids, unless they already begin with it.

        For example, the output of a chat template already begins with BOS.
        """
        start = self.document_start
        has_start = tuple(ids[: len(start)].tolist()) == start
        return ids if has_start else np.concatenate([np.array(start, np.int32), ids])

    def with_end(self, ids: np.ndarray) -> np.ndarray:
        """Adds `document_end` after the ids, unless they already end with it."""
        end = self.document_end
        has_end = tuple(ids[len(ids) - len(end) :].tolist()) == end
        return ids if has_end else np.concatenate([ids, np.array(end, np.int32)])

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encodes a prompt, with `document_start` before it."""
        return self.with_start(self.encode(text, False))

    def without_start(self, ids: np.ndarray) -> np.ndarray:
        """Removes `document_start` from the ids of a prompt, if they begin with it."""
        start = self.document_start
        return ids[len(start) :] if tuple(ids[: len(start)].tolist()) == start else ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        *,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Formats a conversation with the chat template, and tokenizes it by default.

        Args:
          messages: Messages with the keys "role" and "content"; see `ChatTemplate.prepared`.
          add_generation_prompt: Whether to add the start of the model's next message.
          tokenize: Whether to return int32[num_tokens] or a string.
          **variables: Additional variables for the template, such as `tools` or `enable_thinking`.

        Raises:
          ConfigError: There is no template, or the template rejects the conversation or does not
            use all of it. The message includes the template's error message.
        """
        if self.chat is None:
            raise no_chat_template(self)
        chat = self.chat.chosen(variables)
        messages = chat.prepared(messages)

        def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
            return chat.render(messages, add_generation_prompt, **variables)

        text = chat.checked(messages, variables, rendered)
        return self.encode(text, False) if tokenize else text

    def __str__(self) -> str:
        return type(self).__name__ + ("" if self.path is None else f"({str(self.path)!r})")


def no_chat_template(tokenizer: Tokenizer) -> ConfigError:
    """Returns the error for a conversation passed to a tokenizer without a chat template."""
    return ConfigError(
        f"{tokenizer} has no chat template, which formats conversations. Use the tokenizer of an "
        "instruction-tuned version of the model, add chat_template.jinja to a copy of the "
        "tokenizer's directory (see docs/tokenizers.md), or pass strings instead of messages."
    )


def checked_text(text: object) -> str:
    """Checks that a text is a string that can be encoded as UTF-8, and returns it.

    Raises:
      ConfigError: The text is not a string, or contains an unpaired surrogate.
    """
    if not isinstance(text, str):
        raise ConfigError(f"The text to encode is {shortened(repr(text))}; expected a str.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"The text to encode contains the unpaired surrogate {text[error.start]!r} at index "
            f"{error.start}, which cannot be encoded as UTF-8. Fix or remove it."
        ) from None
    return text
