"""The tokenizer of a directory, whichever kind it has."""

import os
from pathlib import Path

from praxis_lite.errors import ConfigError, few, require
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.json_tokenizer import TOKENIZER_JSON, JsonTokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer
from praxis_lite.inputs.tokenizers.sentencepiece_tokenizer import (
    MODEL_FILES,
    SentencePieceTokenizer,
)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Returns the tokenizer of a directory: of its tokenizer.json, else of its tokenizer.model.

    Raises:
      ConfigError: there is no such directory, or it has neither; a damaged file is reported when
        it is first needed.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"There is no directory {directory} with a tokenizer.")
    if (directory / TOKENIZER_JSON).is_file():
        return JsonTokenizer(directory)
    if has_tokenizer(directory):
        return SentencePieceTokenizer(directory)
    raise ConfigError(
        f"{directory} has no tokenizer: wanted is {TOKENIZER_JSON} or {MODEL_FILES[0]}, found are "
        f"{few(sorted(one.name for one in directory.iterdir()))}. Let "
        f"transformers write a {TOKENIZER_JSON}: AutoTokenizer.from_pretrained(DIR)"
        ".save_pretrained(DIR)."
    )


def as_tokenizer(given: Tokenizer | str | os.PathLike[str] | None) -> Tokenizer:
    """Returns a tokenizer for what a config names: itself, that of a directory, or None for bytes.

    Raises:
      ConfigError: as `load_tokenizer`; or it is something else.
    """
    if given is None:
        return ByteTokenizer()
    if isinstance(given, str | os.PathLike):
        return load_tokenizer(given)
    is_one = all(hasattr(given, name) for name in ("encode", "decode", "eos_id", "token_unit"))
    wanted = "a Tokenizer, the directory of one, or None for bytes"
    require(is_one, "The tokenizer", given, wanted)
    return given


def has_tokenizer(directory: Path) -> bool:
    """Returns True if a directory has a tokenizer that `load_tokenizer` reads."""
    return any((directory / name).is_file() for name in (TOKENIZER_JSON, *MODEL_FILES))
