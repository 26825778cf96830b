"""The tokenizer of a directory, whichever kind it has."""

import os
from pathlib import Path

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.files import (
    MODEL_FILES,
    TOKENIZER_JSON,
    has_tokenizer,
    names_in,
)
from praxis_lite.inputs.tokenizers.json_tokenizer import JsonTokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer
from praxis_lite.inputs.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Returns the tokenizer of a directory: of its tokenizer.json, else of its tokenizer.model.

    Raises:
      ConfigError: there is no such directory, or it has neither; a damaged file is reported when
        it is first needed.
    """
    directory = Path(os.path.expanduser(os.fspath(path)))
    if not os.path.isdir(directory):
        raise ConfigError(f"There is no directory {directory} with a tokenizer.")
    if os.path.isfile(directory / TOKENIZER_JSON):
        return JsonTokenizer(directory)
    if has_tokenizer(directory):
        return SentencePieceTokenizer(directory)
    raise ConfigError(
        f"{directory} has no tokenizer: wanted is {TOKENIZER_JSON} or {MODEL_FILES[0]}, found are "
        f"{names_in(directory)}. Let "
        f"transformers write a {TOKENIZER_JSON}: AutoTokenizer.from_pretrained(DIR)"
        ".save_pretrained(DIR)."
    )


def as_tokenizer(given: Tokenizer | str | os.PathLike[str] | None) -> Tokenizer:
    """Returns a tokenizer for a config's value: itself, that of a directory, or None for bytes.

    Raises:
      ConfigError: as `load_tokenizer`; or it is something else.
    """
    if given is None:
        return ByteTokenizer()
    if isinstance(given, str | os.PathLike):
        return load_tokenizer(given)
    require(
        isinstance(given, Tokenizer), "The tokenizer", given,
        "a Tokenizer, the directory of one, or None for bytes",
        "A tokenizer of your own is a subclass of praxis_lite.inputs.tokenizers.Tokenizer.",
    )
    return given

