"""A corpus of text documents with a training and a held-out split."""

import codecs
import functools
import gzip
import hashlib
import logging
import os
import re
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.host.file_reading import has_extension
from praxis_lite.inputs.sources.faults import none_skipped
from praxis_lite.inputs.sources.files.paths import matching_files
from praxis_lite.inputs.sources.files.texts import decode_utf8
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.loading import as_tokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer

SPLITS = ("train", "heldout")
BLOCK_BYTES = 16 * 1024
_LINE_END = rb"(?:\r\n|\n|\r(?!\n))"
# A line end followed by blank lines, which may contain spaces.
_BLANK_LINES = re.compile(rb"(%b(?:[ \t]*%b)+)" % (_LINE_END, _LINE_END))


class TextCorpus:
    """A corpus of text documents with a training and a held-out split.

    Files are read on first use. A document is held out if the last two decimal digits of
    sha256(name), in reverse order, form a number below heldout_percent. For 10 percent, this means
    `sha256(name) % 10 == 0`. Adding documents therefore never moves existing documents to another
    split.

    Paragraphs that also occur in held-out documents are removed from the training split, even if
    their whitespace differs. Otherwise, 19% of the held-out text of the language reference would
    occur in the training data, because the reference repeats itself.

    Args:
        files: Comma-separated globs that match text files; `**` and `~` are supported. Each file is
            split at line ends into documents of at most 16 KiB named `<basename>#<k>`. If None,
            uses CPython's language reference (`pydoc_data.topics`) with one document per topic.
        heldout_percent: Percentage of documents to hold out, from 0 to 100.
        tokenizer: A tokenizer or its directory. If None, tokens are bytes.
    """

    def __init__(
        self,
        files: str | None = None,
        heldout_percent: int = 10,
        tokenizer: Tokenizer | str | None = None,
    ):
        self.files = files
        self.heldout_percent = heldout_percent
        self.tokenizer = as_tokenizer(tokenizer)
        self._tokens: dict[str, np.ndarray] = {}

    def documents(self, split: str) -> list[tuple[str, bytes]]:
        """Returns the (name, text) of each document in a split, in a fixed order.

        Args:
            split: 'train' or 'heldout'.

        Raises:
            ConfigError: The split is unknown or empty, or a file is missing, empty or not UTF-8.
        """
        require_choice("The split of a TextCorpus", split, SPLITS)
        documents = self._splits[split]
        if not documents:
            total = sum(map(len, self._splits.values()))
            raise ConfigError(
                f"TextCorpus: the {split!r} split of {self._source} is empty: with heldout_percent "
                f"{self.heldout_percent}, all {total} documents are in the other split. Change "
                f"heldout_percent, or add text (files are split into documents of "
                f"{BLOCK_BYTES // 1024} KiB)."
            )
        return documents

    def tokens(self, split: str) -> np.ndarray:
        """Returns the token stream EOS, document, EOS, document, ..., EOS of a split, as int32.

        All tokens except the first are labels. With bytes as tokens, the number of labels is
        num_bytes plus one EOS per document. If the tokenizer adds a BOS token, it precedes every
        document.
        """
        if split not in self._tokens:
            tokenizer, documents = self.tokenizer, self.documents(split)
            encoded = tokenizer.encode_documents([text for _, text in documents])
            special = sorted(tokenizer.special_ids)
            found = [
                (tokenizer.decode([ids[is_special][0]]), name)
                for (name, _), ids in zip(documents, encoded, strict=True)
                if (is_special := np.isin(ids, special)).any()
            ]
            if found:
                _log.info(
                    "%s: %s documents of the %r split contain the names of special tokens, which "
                    "are read as these tokens, or characters that the tokenizer does not know, so "
                    "that bits per byte are too low; the first of these tokens is %r in %s",
                    self._source,
                    f"{len(found):,}",
                    split,
                    *found[0],
                )
            end = np.array(tokenizer.document_end, np.int32)
            pieces = [end]
            for ids in encoded:
                # If documents start with EOS, the EOS of the previous document is also the start
                # token.
                starts_with_end = tokenizer.document_start == tokenizer.document_end
                pieces.append(
                    tokenizer.with_end(ids if starts_with_end else tokenizer.with_start(ids))
                )
            # Windows wrap around, so the stream must end with its first token.
            if not len(end):
                pieces.append(np.array(tokenizer.document_start[:1], np.int32))
            self._tokens[split] = np.concatenate(pieces)
        return self._tokens[split]

    def num_bytes(self, split: str) -> int:
        """Returns the number of bytes of text in the split, not counting EOS tokens."""
        return sum(len(text) for _, text in self.documents(split))

    def gzip_bits_per_byte(self, split: str) -> float:
        """Returns the number of bits per byte to which `gzip -9` compresses the split.

        Each document is followed by a zero byte, which stands for EOS and is counted as a byte.
        Compare the result with loss / ln 2 for a byte-level model, and with
        loss / ln 2 * `tokens_per_byte` for any other tokenizer.
        """
        data = b"".join(text + b"\0" for _, text in self.documents(split))
        return 8 * len(gzip.compress(data, compresslevel=9, mtime=0)) / len(data)

    def tokens_per_byte(self, split: str) -> float:
        """Returns the number of labels per byte, counting the end of each document as one byte."""
        num_bytes = self.num_bytes(split) + len(self.documents(split))
        return (len(self.tokens(split)) - 1) / num_bytes

    def fingerprint(self) -> dict[str, Any]:
        """Returns hashes of the tokenizer and of all names, texts and splits, but not of paths."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return dict(self._fingerprint)
        return {**self._fingerprint, **self.tokenizer.fingerprint()}

    @functools.cached_property
    def _fingerprint(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for split in SPLITS:
            for name, text in self._splits[split]:
                digest.update(f"{split} {len(name)} {name} {len(text)} ".encode() + text)
        return {"heldout_percent": self.heldout_percent, "sha256": digest.hexdigest()}

    @functools.cached_property
    def _splits(self) -> dict[str, list[tuple[str, bytes]]]:
        require_percent("TextCorpus.heldout_percent", self.heldout_percent)
        splits: dict[str, list[tuple[str, bytes]]] = {split: [] for split in SPLITS}
        if self.files is None:
            documents = language_reference()
        else:
            files = matching_files(self.files)
            documents = [document for path in files for document in read_documents(path)]
        for name, text in documents:
            is_held_out = _percentile(name) < self.heldout_percent
            splits["heldout" if is_held_out else "train"].append((name, text))
        # No paragraph of a held-out document may occur in a training document.
        held_out = {_words(part) for _, text in splits["heldout"] for part in _paragraphs(text)}
        unseen = [(name, _without(text, held_out)) for name, text in splits["train"]]
        splits["train"] = [(name, text) for name, text in unseen if text]
        return splits

    @property
    def _source(self) -> str:
        return "the Python language reference" if self.files is None else repr(self.files)


def require_percent(setting: str, found: Any) -> None:
    """Raises ConfigError unless a setting is an integer from 0 to 100."""
    is_percent = hasattr(found, "__index__") and 0 <= found <= 100
    require(is_percent, setting, found, "an integer from 0 to 100")


def _paragraphs(text: bytes) -> list[bytes]:
    """Returns the paragraphs that are long enough to count as leaked held-out text."""
    return [part for part in _BLANK_LINES.split(text)[::2] if len(part) >= 40]


def _words(paragraph: bytes) -> bytes:
    """Returns a paragraph with single spaces, so that line breaks and indentation do not count.

    In particular, the last paragraph of a file ends with a line break, and others do not.
    """
    return b" ".join(paragraph.split())


def _without(text: bytes, held_out: set[bytes]) -> bytes:
    """Returns a text without the paragraphs whose `_words` are in `held_out`."""
    parts = [b"", *_BLANK_LINES.split(text)]  # A separator, a paragraph, a separator, ...
    pairs = zip(parts[::2], parts[1::2], strict=True)
    kept = [(separator, part) for separator, part in pairs if _words(part) not in held_out]
    if not kept:
        return b""
    (_, first), *others = kept
    return first + b"".join(separator + part for separator, part in others)


def _percentile(name: str) -> int:
    """Returns a number from 0 to 99 that depends only on the document's name."""
    # Reversing the digits makes 10 percent equivalent to the simple rule "hash % 10 == 0".
    tens, ones = divmod(int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100, 10)
    return 10 * ones + tens


def language_reference() -> list[tuple[str, bytes]]:
    """Returns CPython's language reference as pairs (topic, text)."""
    from pydoc_data.topics import topics

    return [(name, topics[name].encode()) for name in sorted(topics)]


def read_documents(path: str) -> list[tuple[str, bytes]]:
    """Splits a file into blocks, and returns them as pairs (`<basename>#<k>`, UTF-8 bytes).

    A byte order mark at the start of the file is removed. For JSON lines, a warning is logged.

    Raises:
        ConfigError: The file is empty or not UTF-8. The message names the file and the line.
    """
    with open(path, "rb") as file:
        data = file.read().removeprefix(codecs.BOM_UTF8)
    if not data:
        raise ConfigError(
            f"TextCorpus: the text file {path!r} is empty. Add text, or remove it from files."
        )
    with none_skipped():
        decode_utf8(data, f"TextCorpus: {path}", is_file=True)
    if has_extension(path, ".jsonl", ".ndjson"):
        _log.warning(
            "%s is read as plain text, including the syntax of JSON. To read the texts in it, use "
            "JsonLines (docs/data.md).",
            path,
        )
    name = os.path.basename(path)
    return [(f"{name}#{k}", block) for k, block in enumerate(_blocks(data))]


def _blocks(data: bytes) -> list[bytes]:
    """Splits UTF-8 into blocks of at most BLOCK_BYTES, at line ends or else between characters."""
    blocks, start = [], 0
    while start < len(data):
        end = min(start + BLOCK_BYTES, len(data))
        if end < len(data):
            line_end = data.rfind(b"\n", start, end)
            if line_end >= 0:
                end = line_end + 1
            else:
                # Step back over continuation bytes (10xxxxxx) to the start of a character.
                end -= next((n for n in range(4) if data[end - n] & 0xC0 != 0x80), 0)
        blocks.append(data[start:end])
        start = end
    return blocks


_log = logging.getLogger(__name__)
