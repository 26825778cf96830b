"""Base of the tokenizers of a directory: special tokens, ends and the template of its files."""

import abc
import functools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from praxis_lite.inputs.tokenizers.files import TOKENIZER_CONFIG, TokenizerFiles
from praxis_lite.inputs.tokenizers.special.named_tokens import FLAGS, Token
from praxis_lite.inputs.tokenizers.special.special_tokens import SpecialTokens

# An answer that no template has in it; and a token that may stand behind it.
_ANSWER = "praxislite"
_MARK = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")


class DirectoryTokenizer(Tokenizer):
    """A tokenizer of files; they are read when they are first needed.

    Args:
      path: the directory, or the file that says how text is cut.
    """

    def __init__(self, path: str | os.PathLike[str]):
        # Path.expanduser raises where there is no such home.
        self.path = Path(os.path.expanduser(os.fspath(path)))

    # How tokens are looked for in a text, as far as the library does it.
    _flags: Sequence[str] = FLAGS

    @property
    @abc.abstractmethod
    def special(self) -> SpecialTokens:
        """Special and added tokens of the directory, and their roles."""

    @property
    @abc.abstractmethod
    def _files(self) -> TokenizerFiles:
        """The files of the directory."""

    @abc.abstractmethod
    def _former_tokens(self) -> Mapping[int, Token]:
        """Returns the tokens that former versions looked for in a text."""

    @abc.abstractmethod
    def _former_role(self, role: str, text: object) -> int | None:
        """Returns the id that former versions took for a role that a file names `text`."""

    @property
    def directory(self) -> Path:
        return self._files.directory

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": type(self).__name__, "sha256": self._sha256}

    @property
    def vocab_size(self) -> int:
        return self.special.vocab_size

    @property
    def eos_id(self) -> int | None:
        return self.special.roles.get("eos_token")

    @property
    def model_eos_ids(self) -> tuple[int, ...]:
        return self.special.model_eos_ids

    @property
    def bos_id(self) -> int | None:
        return self.special.roles.get("bos_token")

    @property
    def pad_id(self) -> int | None:
        return self.special.roles.get("pad_token")

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        return self.special.special_ids

    @functools.cached_property
    def chat(self) -> ChatTemplate | None:
        sources = self._files.chat_templates
        default = sources.get("default", sources.get("tool_use"))
        if default is None:
            return None
        return ChatTemplate(default, self.special.texts, sources.get("tool_use"))

    @functools.cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        # The first thing behind an answer, if it is one token by itself: <|im_end|>, </s>.
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = "" if self.chat is None else self.chat.render(messages)
        except ConfigError:
            return ()  # Said where a conversation is to be read.
        mark = _MARK.match(text.rpartition(_ANSWER)[2]) if _ANSWER in text else None
        if mark is None:
            return ()
        ids = self.encode(mark[1], False).tolist()
        return tuple(ids) if len(ids) == 1 else ()

    @functools.cached_property
    def _sha256(self) -> str:
        return self._files.sha256(self._decided_besides())

    def _say_what_is_not_followed(self) -> None:
        fields = self._files.json(TOKENIZER_CONFIG)
        model = fields.get("sp_model_kwargs")
        if isinstance(model, Mapping) and model.get("enable_sampling"):
            _log.info("%s: enable_sampling is not followed: a text has one encoding", self)
        if fields.get("split_special_tokens") is True:
            _log.info("%s: split_special_tokens is not followed: each is one id in a text", self)

    def _decided_besides(self) -> str:
        """Returns facts that decide the ids of a text and that former versions read otherwise.

        It is "" for most directories, so that data that is the same keeps its fingerprint.
        """
        special = self.special  # Its errors first.
        former, fields = self._former_tokens(), self._files.former_fields
        new = [
            [number, token.text, dict(token.flags)] for number, token in special.tokens.items()
            if number not in former or former[number].text != token.text
            or any(
                former[number].flags.get(name, False) != token.flags.get(name, False)
                for name in self._flags
            )
        ]
        roles = {
            role: special.roles.get(role) for role in ("bos_token", "eos_token")
            if self._former_role(role, fields.get(role)) != special.roles.get(role)
        }
        return json.dumps([new, roles]) if new or roles else ""


_log = logging.getLogger(__name__)
