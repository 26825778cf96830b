"""The tokenizer that a path or a setting names."""

import os
from pathlib import Path

from praxis_lite.core.errors import ConfigError, few, require
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.files import has_tokenizer
from praxis_lite.inputs.tokenizers.json_tokenizer import JsonTokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> JsonTokenizer:
    """Returns the tokenizer of a directory, as transformers' AutoTokenizer reads it.

    Raises:
      ConfigError: there is no such directory, or it has no vocabulary. Its files are read when
        they are first needed.
    """
    directory = Path(os.path.expanduser(os.fspath(path)))
    if not os.path.isdir(directory):
        raise ConfigError(f"There is no directory {directory} with a tokenizer.")
    if not has_tokenizer(directory):
        raise ConfigError(
            f"{directory} has no tokenizer: expected tokenizer.json, tokenizer.model or another "
            f"vocabulary, found {few(sorted(os.listdir(directory)))}. Name another directory."
        )
    return JsonTokenizer(directory)


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
        "A custom tokenizer is a subclass of praxis_lite.inputs.tokenizers.Tokenizer.",
    )
    return given
