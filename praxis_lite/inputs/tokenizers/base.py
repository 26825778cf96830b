"""What every tokenizer has: ids of a text, the text of ids, and the ids that stand for no text."""

import abc
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate


class Tokenizer(abc.ABC):
    """Text into ids and back. All that a text corpus, prompts and a language model's task ask for.

    Attributes:
      token_unit: what one id stands for, "byte" or "token"; names the metric bits_per_<unit>.
      vocab_size: ids are below it, special ones included; None: any number is an id.
      eos_id: ends a text; None if there is none.
      eos_ids: each of them ends what a model writes: eos_id, `model_eos_ids`, `turn_end_ids`.
      model_eos_ids: the ends that generation_config.json, or else config.json, names.
      turn_end_ids: the ends of a turn of a chat, as the template writes them after an answer.
      bos_id, pad_id: of the beginning of a text and of padding; None if there is none.
      special_ids: of tokens that stand for no text, and are left out where those are skipped.
      begin_ids, end_ids: the special tokens that `encode` puts before and after a text.
      document_start, document_end: the ids around a document; prompts begin with the former.
      chat: the template of its chats, or None.
    """

    token_unit: str = "token"
    vocab_size: int | None = None
    eos_id: int | None = None
    model_eos_ids: Sequence[int] = ()
    turn_end_ids: Sequence[int] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    special_ids: frozenset[int] = frozenset()
    begin_ids: Sequence[int] = ()
    end_ids: Sequence[int] = ()
    chat: ChatTemplate | None = None
    path: str | os.PathLike[str] | None = None  # Of a tokenizer of files.

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Returns int32[num_tokens], between `begin_ids` and `end_ids` unless told otherwise."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of the ids; special tokens stand in it as text unless skipped."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that decide a text's ids, as JSON: equal for equal tokenizers."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        local = () if self.eos_id is None else (self.eos_id,)
        return tuple(dict.fromkeys((*local, *self.model_eos_ids, *self.turn_end_ids)))

    def name_of(self, token: int) -> str | None:
        """Returns a token as its vocabulary has it, "<0xE2>" for a byte, or None."""
        return None

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text without special tokens around it, and where each stands.

        Returns:
          ids int32[num_tokens]; int64[num_tokens, 2]: the first character of each, and the one
          behind its last. Tokens that share a character all have it.

        Raises:
          ConfigError: the tokenizer does not know it.
        """
        raise ConfigError(f"{self} does not know where in a text its tokens stand.")

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each text without special tokens.

        Bytes that are no UTF-8, as where a file was cut within a character, become U+FFFD.
        """
        return [self.encode(text.decode(errors="replace"), False) for text in texts]

    def cut(self, text: bytes, length: int) -> bytes:
        """Returns the first bytes of a text, at most `length`, without a part of a character."""
        return text[:length].decode(errors="ignore").encode()

    # What precedes and follows a text: the only rule for prompts, documents and answers. It starts
    # from what transformers puts around a text for this directory, `begin_ids` and `end_ids`.

    @property
    def document_start(self) -> tuple[int, ...]:
        """The ids before the first token of a prompt or a document: `begin_ids` unless overridden.

        Most models without a BOS, such as Qwen and GPT-2, have none.
        """
        return tuple(self.begin_ids)

    @property
    def document_end(self) -> tuple[int, ...]:
        """The ids after the last token of a document: the EOS, else `end_ids`."""
        return tuple(self.end_ids) if self.eos_id is None else (self.eos_id,)

    def with_start(self, ids: np.ndarray) -> np.ndarray:
        """Returns ids that begin with `document_start`, which is not repeated.

        A text that a chat template rendered has its BOS already.
        """
        start = self.document_start
        has_start = tuple(ids[: len(start)].tolist()) == start
        return ids if has_start else np.concatenate([np.array(start, np.int32), ids])

    def with_end(self, ids: np.ndarray) -> np.ndarray:
        """Returns ids that end with `document_end`, which is not repeated."""
        end = self.document_end
        has_end = tuple(ids[len(ids) - len(end) :].tolist()) == end
        return ids if has_end else np.concatenate([ids, np.array(end, np.int32)])

    def encode_prompt(self, text: str) -> np.ndarray:
        """Returns the ids of a text to continue, from `document_start` on."""
        return self.with_start(self.encode(text, False))

    def without_start(self, ids: np.ndarray) -> np.ndarray:
        """Returns the ids of a prompt without `document_start`, if they begin with it."""
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
        """Returns a conversation as the model was taught to read it: int32[num_tokens], or text.

        Args:
          messages: each with a "role" and a "content"; see `ChatTemplate.prepared`.
          add_generation_prompt: True: the answer of the model is to come next.
          tokenize: False: the text.
          variables: further ones of the template: `tools`, `enable_thinking`.

        Raises:
          ConfigError: there is no template, it refuses the conversation, or does not read a part of
            it; says what it said.
        """
        if self.chat is None:
            raise ConfigError(
                f"{self} has no chat template. Put one beside its files, as chat_template.jinja or "
                "as chat_template in tokenizer_config.json, or give texts instead of messages."
            )
        chat = self.chat.chosen(variables)
        messages = chat.prepared(messages)

        def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
            return chat.render(messages, add_generation_prompt, **variables)

        text = chat.checked(messages, variables, rendered)
        return self.encode(text, False) if tokenize else text

    def __str__(self) -> str:
        return type(self).__name__ + ("" if self.path is None else f"({str(self.path)!r})")


def checked_text(text: object) -> str:
    """Returns a text to encode, which is a str that UTF-8 can write.

    Raises:
      ConfigError: it is something else, or has half of a character.
    """
    if not isinstance(text, str):
        raise ConfigError(f"A text to encode is {shown(repr(text))}; expected a str.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"A text to encode has {text[error.start]!r} at its character {error.start}, which is "
            "half of a character. Write the data in UTF-8, or leave it out."
        ) from None
    return text
