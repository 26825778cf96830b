"""Loads tokenizers from directories and config values."""

import os

from praxis_lite.core.errors import ConfigError, first_few, require
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.files import has_tokenizer, tokenizer_folder
from praxis_lite.inputs.tokenizers.json_tokenizer import JsonTokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> JsonTokenizer:
    """Loads a tokenizer, with the same ids as transformers' AutoTokenizer.

    The files are read on first use.

    Args:
      path: Directory of the tokenizer, or hf://org/name[@revision] on the Hugging Face Hub.

    Raises:
      ConfigError: The directory does not exist, or does not contain a vocabulary; or the repository
        cannot be downloaded.
    """
    directory = tokenizer_folder(path)
    if not os.path.isdir(directory):
        raise ConfigError(f"The tokenizer directory {directory} does not exist.")
    if not has_tokenizer(directory):
        raise ConfigError(
            f"{directory} does not contain a tokenizer: expected tokenizer.json, tokenizer.model "
            f"or another vocabulary, found {first_few(sorted(os.listdir(directory)))}. Specify a "
            "different directory."
        )
    return JsonTokenizer(directory)


def as_tokenizer(tokenizer: Tokenizer | str | os.PathLike[str] | None) -> Tokenizer:
    """Converts a config value to a tokenizer.

    Args:
      tokenizer: A tokenizer, the directory or hf:// URL of a tokenizer, or None for a byte
        tokenizer.

    Raises:
      ConfigError: The value has another type, or the directory does not contain a tokenizer.
    """
    if tokenizer is None:
        return ByteTokenizer()
    if isinstance(tokenizer, str | os.PathLike):
        return load_tokenizer(tokenizer)
    require(
        isinstance(tokenizer, Tokenizer),
        "The tokenizer",
        tokenizer,
        "a Tokenizer, the directory of a tokenizer, or None for bytes",
        "Custom tokenizers must be subclasses of praxis_lite.inputs.tokenizers.Tokenizer.",
    )
    return tokenizer
