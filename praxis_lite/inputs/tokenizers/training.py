"""Trains byte-level BPE tokenizers like those of GPT-2 and Llama 3, and describes tokenizers."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from praxis_lite.core.errors import require, shortened
from praxis_lite.host.atomic_files import new_directory
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.files.paths import matching_files
from praxis_lite.inputs.text.corpus import read_documents
from praxis_lite.inputs.tokenizers.chat_template import chatml
from praxis_lite.inputs.tokenizers.files import TEMPLATE, TOKENIZER_CONFIG, TOKENIZER_JSON
from praxis_lite.inputs.tokenizers.json_tokenizer import JsonTokenizer

# GPT-4's pre-tokenization pattern. Tokens never cross the boundaries of its matches: a word with
# the space before it, up to three digits, punctuation, whitespace, and line ends.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|end_of_text|>"
BEGIN_TURN, END_TURN = "<|begin_of_turn|>", "<|end_of_turn|>"
CHAT = chatml(BEGIN_TURN, END_TURN)


def train_tokenizer(
    files: str,
    directory: Path,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    chat_template: str = CHAT,
) -> JsonTokenizer:
    """Trains a byte-level BPE tokenizer and writes it to a directory.

    The tokenizer has an end-of-text token, special tokens for the start and end of a turn, and a
    chat template.

    Args:
      files: Comma-separated globs that match text files.
      directory: A new or empty directory.
      vocab_size: Number of tokens, including special tokens.
      special_tokens: Additional special tokens. They must not occur in ordinary text.
      chat_template: A Jinja chat template.

    Returns:
      The new tokenizer.

    Raises:
      ConfigError: No file matches, the directory is not empty, the vocabulary is too small, or a
        special token could occur in ordinary text.
    """
    special = [END, BEGIN_TURN, END_TURN]
    for token in special_tokens:
        _check_special(token, special)
        special.append(token)
    minimum = 256 + len(special)
    require(
        vocab_size >= minimum,
        "--vocab-size",
        vocab_size,
        f"at least {minimum}, for 256 bytes and {len(special)} special tokens",
    )
    paths = matching_files(files)
    with new_directory(directory, TOKENIZER_JSON) as target:
        _train_and_write(paths, target, vocab_size, special, chat_template)
    return JsonTokenizer(directory)


def _check_special(token: str, before: Sequence[str]) -> None:
    def check(is_valid: bool, expected: str) -> None:
        require(is_valid, "--special", token, expected, "Write it like <|name|>.")

    check(isinstance(token, str) and token != "", "a nonempty string")
    try:
        token.encode()
    except UnicodeEncodeError:
        check(False, "a string without unpaired surrogates")
    check(token not in before, f"a token other than the existing {', '.join(before)}")
    library = optional_module("tokenizers", "Training a tokenizer")
    cut = library.pre_tokenizers.Split(library.Regex(PIECES), "isolated")
    # The trainer may learn any single match of the pattern as an ordinary token. If a special token
    # were such a match, text that contains it would be encoded as the special token.
    is_text = len(cut.pre_tokenize_str(token)) == 1 or token != token.strip()
    is_text |= all(part.isalnum() for part in token.split())
    check(not is_text, "a token that does not occur in ordinary text")


def _train_and_write(
    paths: Sequence[str], target: Path, vocab_size: int, special: Sequence[str], chat_template: str
) -> None:
    library = optional_module("tokenizers", "Training a tokenizer")
    decoders, pre_tokenizers = library.decoders, library.pre_tokenizers
    result = library.Tokenizer(library.models.BPE())
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(library.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    result.decoder = decoders.ByteLevel()
    # With all bytes in the alphabet, any text can be encoded.
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        show_progress=sys.stderr.isatty(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )

    def texts() -> Iterator[str]:
        for number, path in enumerate(paths, 1):
            _log.info("reading %s (%d of %d)", path, number, len(paths))
            for _, text in read_documents(path):
                yield text.decode(errors="replace")

    result.train_from_iterator(texts(), trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": special[1:],
        "model_max_length": 10**9,
    }
    (target / TOKENIZER_JSON).write_text(result.to_str(pretty=True), "utf-8")
    (target / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (target / TEMPLATE).write_text(chat_template, "utf-8")
    # Either of these tokens ends an answer.
    ends = {"eos_token_id": [result.token_to_id(END), result.token_to_id(END_TURN)]}
    (target / "generation_config.json").write_text(json.dumps(ends) + "\n", "utf-8")


def description(tokenizer: JsonTokenizer) -> str:
    """Describes a tokenizer's vocabulary size, special tokens, end tokens and chat template."""
    return "\n".join(_lines(tokenizer))


def _lines(tokenizer: JsonTokenizer) -> Iterator[str]:
    def described(ids: Iterable[int]) -> str:
        texts = (f"{number} {shortened(repr(tokenizer.decode([number])))}" for number in ids)
        return ", ".join(texts) or "none"

    yield f"{tokenizer}: ids from 0 to {tokenizer.vocab_size - 1}"
    for role, text in tokenizer.roles.items():
        yield f"  {role:12} {shortened(repr(text))}"
    yield f"  before a text: {described(tokenizer.begin_ids)}"
    yield f"  after a text: {described(tokenizer.end_ids)}"
    yield f"  end of a document: {described(tokenizer.document_end)}"
    yield f"  end of an answer: {described(tokenizer.eos_ids)}"
    yield f"  chat template: {'none' if tokenizer.chat is None else 'yes'}"
    yield f"{len(tokenizer.special_ids)} special tokens: {described(sorted(tokenizer.special_ids))}"


_log = logging.getLogger(__name__)
