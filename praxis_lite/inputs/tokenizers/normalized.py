"""Normalizes tokenizer directories to a single format, using transformers for the conversion.

The normalized format is a plain fast tokenizer of transformers: tokenizer.json contains all tokens
and the rule for adding special tokens to a text, and tokenizer_config.json lists the special
tokens. Any other directory (a SentencePiece model, vocab.json and merges.txt, vocab.txt, or a
tokenizer.json that a transformers class modifies on loading) is read once with AutoTokenizer and
saved in this format. Ids, special tokens and templates are therefore the same as in transformers.
"""

import hashlib
import importlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, first_few, shortened
from praxis_lite.host.atomic_files import user_cache
from praxis_lite.host.optional_packages import optional_module, require_package
from praxis_lite.inputs.tokenizers.files import (
    ADDED_TOKENS,
    CONFIG,
    GENERATION_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    model_eos_ids,
    names_of_tokenizer,
    read_fields,
    special_tokens,
)

# Classes of transformers that load a tokenizer.json unchanged.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
# A field in tokenizer_config.json that marks normalized directories, and the format's version.
_MARK, _VERSION = "normalized_by_praxis_lite", 1
# Number of pieces of a SentencePiece model whose ids are compared after a conversion.
_NUM_COMPARED = 1000


def opened(directory: Path) -> tuple[Path, Any]:
    """Opens the tokenizer in a directory, which is first normalized if necessary.

    Returns:
      A tuple of the normalized directory, which may be the given directory, and the
      `tokenizers.Tokenizer`.

    Raises:
      ConfigError: A file is damaged, or transformers is required but is not installed or cannot
        read the directory.
    """
    if _is_plain(directory):
        tokenizer = read_tokenizer(directory / TOKENIZER_JSON)
        is_normalized = read_fields(directory / TOKENIZER_CONFIG).get(_MARK) == _VERSION
        if is_normalized or _has_all_settings(directory, tokenizer):
            return directory, tokenizer
    directory = normalized_copy(directory)
    return directory, read_tokenizer(directory / TOKENIZER_JSON)


def read_tokenizer(path: Path) -> Any:
    """Reads a tokenizer.json as a deterministic `tokenizers.Tokenizer`.

    Truncation, padding and dropout are disabled, because these are settings for a training run, not
    properties of the tokenizer.

    Raises:
      ConfigError: The file is damaged.
    """
    library = optional_module("tokenizers", f"The tokenizer {path}")
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises no narrower exception.
        raise ConfigError(
            f"The tokenizer file {path} cannot be read: {shortened(str(error), 200)}. Copy it "
            "again."
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _is_plain(directory: Path) -> bool:
    """Returns whether transformers would load the directory's tokenizer.json unchanged."""
    if not (directory / TOKENIZER_JSON).is_file():
        return False
    fields = read_fields(directory / TOKENIZER_CONFIG)
    name = fields.get("tokenizer_class")
    if name is None:
        model = read_fields(directory / CONFIG)
        return not {"model_type", "tokenizer_class"} & model.keys()
    return name in _PLAIN and "auto_map" not in fields


def _has_all_settings(directory: Path, tokenizer: Any) -> bool:
    """Returns whether tokenizer.json includes all settings from the directory's other files."""
    fields = read_fields(directory / TOKENIZER_CONFIG)
    # Each added token must be in tokenizer.json, with the same flags.
    added = tokenizer.get_added_tokens_decoder()
    if "added_tokens_decoder" in fields:
        for number, token in fields["added_tokens_decoder"].items():
            known = added.get(int(number))
            if (
                known is None
                or known.content != token["content"]
                or any(
                    getattr(known, name) != value
                    for name, value in token.items()
                    if name in ("special", "lstrip", "rstrip", "single_word", "normalized")
                )
            ):
                return False
    elif (directory / ADDED_TOKENS).exists():
        return False
    # Each token with a role, such as the end token, must be marked as special.
    roles = special_tokens(directory)
    special = {token.content for token in added.values() if token.special}
    extra = [*_texts(fields, "extra_special_tokens"), *_texts(fields, "additional_special_tokens")]
    if not special.issuperset([*roles.values(), *extra]):
        return False
    # special_tokens_map.json must not contradict tokenizer_config.json.
    for role, value in read_fields(directory / SPECIAL_TOKENS).items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, list) or text != roles.get(role):
            return False
    # transformers ignores add_bos_token and add_eos_token if there is a tokenizer.json.
    return True


def _texts(fields: dict[str, Any], name: str) -> list[str]:
    tokens = fields.get(name) or []
    tokens = tokens.values() if isinstance(tokens, dict) else tokens
    return [token["content"] if isinstance(token, dict) else token for token in tokens]


def normalized_copy(directory: Path) -> Path:
    """Returns the cached normalized copy of a directory, after creating it if necessary.

    The cache key consists of a hash of the directory's files and the version of transformers,
    because versions of transformers convert some files differently. If transformers is not
    installed, a copy that any version has created is used.

    Raises:
      ConfigError: The cache cannot be written, or `write_normalized` fails.
    """
    digest = hashlib.sha256(f"{_VERSION}".encode())
    for name in (*names_of_tokenizer(directory), CONFIG):
        if (directory / name).is_file():
            content = (directory / name).read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
    folder_of_copies, name = user_cache() / "tokenizers", digest.hexdigest()[:32]
    try:
        target = folder_of_copies / f"{name}-{importlib.metadata.version('transformers')}"
    except importlib.metadata.PackageNotFoundError:
        target = max(folder_of_copies.glob(f"{name}-*"), default=folder_of_copies / name)
    if (target / TOKENIZER_JSON).is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            new = Path(folder, "new")
            new.mkdir()
            write_normalized(directory, new)
            os.rename(new, target)
    except OSError as error:
        # Another process may have written the same copy at the same time.
        if not (target / TOKENIZER_JSON).is_file():
            raise ConfigError(
                f"The normalized tokenizer of {directory} cannot be written to {target.parent}: "
                f"{error}. Set XDG_CACHE_HOME to a writable directory."
            ) from error
    return target


def write_normalized(source: Path, target: Path) -> None:
    """Reads a tokenizer with transformers and writes it in the normalized format.

    Raises:
      ConfigError: transformers is not installed, or cannot read the source directory.
    """
    tokenizer = _of_transformers(source)
    tokenizer.save_pretrained(target)
    _mark_special(target / TOKENIZER_JSON, tokenizer)
    written = read_fields(target / TOKENIZER_CONFIG)
    fields = {
        _MARK: _VERSION,
        "tokenizer_class": _PLAIN[0],
        **tokenizer.special_tokens_map,
        "additional_special_tokens": [str(token) for token in tokenizer.extra_special_tokens],
    }
    copied = ("model_max_length", "clean_up_tokenization_spaces", "split_special_tokens")
    fields |= {name: written[name] for name in copied if name in written}
    (target / TOKENIZER_CONFIG).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    generation = read_fields(source / GENERATION_CONFIG)
    if ends := model_eos_ids(source):
        generation["eos_token_id"] = list(ends)
    if generation:
        (target / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n", "utf-8")


def _mark_special(path: Path, tokenizer: Any) -> None:
    """Marks tokens in a tokenizer.json as special if transformers skips them when decoding.

    These include tokens with a role, such as EOS, even if added_tokens lists them as not special.
    """
    fields = read_fields(path)
    for token in fields["added_tokens"]:
        skipped, text = (
            tokenizer.decode([token["id"]], skip_special_tokens=skips) for skips in (True, False)
        )
        token["special"] = skipped == "" and text != ""
    path.write_text(json.dumps(fields, ensure_ascii=False, indent=2), "utf-8")


def _of_transformers(directory: Path) -> Any:
    # Suppress transformers' warning that PyTorch is missing; tokenizers do not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    transformers = optional_module(
        "transformers", f"The first use of {directory}, which is not a plain tokenizer.json,"
    )

    def read(directory: Path) -> Any:
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )

    models = [*directory.glob("*.model"), *directory.glob("*.spm")]
    if models and not (directory / TOKENIZER_JSON).is_file():
        require_package("sentencepiece", f"The first use of {models[0]}")
        _require_new_protobuf(models[0])
        _require_new_transformers(models[0], transformers.__version__)
    try:
        if len(models) == 1 and len(names_of_tokenizer(directory)) == 1:
            # A single SentencePiece model; transformers only reads it under the default name.
            with tempfile.TemporaryDirectory() as folder:
                shutil.copyfile(models[0], f"{folder}/tokenizer.model")
                if (directory / CONFIG).is_file():
                    shutil.copyfile(directory / CONFIG, f"{folder}/{CONFIG}")
                tokenizer = read(Path(folder))
                if not (directory / CONFIG).is_file():
                    _require_same_ids(models[0], tokenizer)
        else:
            tokenizer = read(directory)
    except ConfigError:
        raise
    except Exception as error:  # The classes in transformers may raise any exception.
        raise ConfigError(
            f"transformers cannot read the tokenizer in {directory}, which contains "
            f"{first_few(names_of_tokenizer(directory))}: {type(error).__name__}: "
            f"{shortened(str(error), 300)}. Add all tokenizer files that were published with the "
            "model to the directory."
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"The tokenizer in {directory} is a {type(tokenizer).__name__}, which cannot be saved "
            "as tokenizer.json. Convert it to a fast tokenizer."
        )
    return tokenizer


def _require_new_protobuf(model: Path) -> None:
    """Raises ConfigError if sentencepiece needs a newer protobuf than is installed.

    Without this check, transformers would try to read the model as a tiktoken file.
    """
    try:
        importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except Exception as error:  # protobuf's own exception, or an ImportError.
        reason = shortened(str(error), 300).rstrip(".")
        raise ConfigError(
            f"The SentencePiece model {model} cannot be read: {reason}. Upgrade protobuf."
        ) from None


def _require_new_transformers(model: Path, version: str) -> None:
    """Raises ConfigError if this transformers changes the ids of SentencePiece models."""
    major, minor = map(int, version.split(".")[:2])
    if (major, minor) < (5, 24):
        raise ConfigError(
            f"transformers {version} converts SentencePiece models, such as {model}, to tokenizers "
            "with different ids. Install transformers 5.24 or newer, or add the model's "
            "tokenizer.json to the directory."
        )


def _require_same_ids(model: Path, tokenizer: Any) -> None:
    """Raises ConfigError if a converted SentencePiece model and the original give different ids."""
    library = optional_module("sentencepiece", f"The tokenizer {model}").SentencePieceProcessor(
        model_file=str(model)
    )
    is_text = [
        not (library.is_control(id) or library.is_unknown(id) or library.is_byte(id))
        for id in range(library.get_piece_size())
    ]
    pieces = [library.id_to_piece(id) for id in np.flatnonzero(is_text)[:_NUM_COMPARED].tolist()]
    text = "".join(pieces).replace("\u2581", " ")
    if tokenizer.encode(text, add_special_tokens=False) != library.encode(text):
        version = importlib.metadata.version("transformers")
        raise ConfigError(
            f"transformers {version} converts the SentencePiece model {model} to a tokenizer with "
            "different ids. Add the model's tokenizer_config.json to the directory."
        )
