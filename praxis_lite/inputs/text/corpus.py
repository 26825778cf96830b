"""A corpus of text documents, split into training and held-out documents, and its tokens."""

import codecs
import functools
import gzip
import hashlib
import os
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.inputs.sources.faults import none_skipped
from praxis_lite.inputs.sources.files.paths import matching_files
from praxis_lite.inputs.sources.files.texts import decode_utf8
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.loading import as_tokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer

SPLITS = ("train", "heldout")
BLOCK_BYTES = 16 * 1024


class TextCorpus:
    """Text documents, read on first use; a hash of a document's name decides its split.

    A document is held out if the last two decimal digits of sha256(name), in reverse order, are
    below heldout_percent; at 10 that is `sha256(name) % 10 == 0`. So adding documents moves no
    other document to the other split. A paragraph that is also in a held-out document is left out
    of training: the language reference repeats itself, and 19% of the held-out text would
    otherwise be in the training data.

    Args:
        files: globs of text files, separated by commas; `**` and `~` work. Each file is split, at
            line ends, into documents of at most 16 KiB named `<basename>#<k>`. None: CPython's
            language reference (`pydoc_data.topics`), a document per topic.
        heldout_percent: 0 to 100.
        tokenizer: or the directory of one; None: bytes.
    """

    def __init__(
        self, files: str | None = None, heldout_percent: int = 10,
        tokenizer: Tokenizer | str | None = None,
    ):
        self.files = files
        self.heldout_percent = heldout_percent
        self.tokenizer = as_tokenizer(tokenizer)
        self._tokens: dict[str, np.ndarray] = {}

    def documents(self, split: str) -> list[tuple[str, bytes]]:
        """Returns the (name, text) of each document of 'train' or 'heldout', in a fixed order.

        Raises:
            ConfigError: another split; no documents in it; files that are missing, empty or not
                UTF-8.
        """
        require_choice("The split of a TextCorpus", split, SPLITS)
        documents = self._splits[split]
        if not documents:
            total = sum(map(len, self._splits.values()))
            raise ConfigError(
                f"TextCorpus: the {split!r} split of {self._source} is empty: at heldout_percent "
                f"{self.heldout_percent} all {total} documents fall to the other split. Change "
                f"heldout_percent, or give more text (files are split into documents of "
                f"{BLOCK_BYTES // 1024} KiB)."
            )
        return documents

    def tokens(self, split: str) -> np.ndarray:
        """Returns the stream EOS, document, EOS, document, ..., EOS as int32.

        All but the first are labels; with bytes there are num_bytes + one EOS per document. If
        the tokenizer puts a BOS before a text, each document has it as well.
        """
        if split not in self._tokens:
            tokenizer = self.tokenizer
            texts = [text for _, text in self.documents(split)]
            end = np.array(tokenizer.document_end, np.int32)
            pieces = [end]
            for ids in tokenizer.encode_documents(texts):
                # An EOS that starts documents is the one that ends the document before.
                starts_with_end = tokenizer.document_start == tokenizer.document_end
                pieces.append(tokenizer.with_end(
                    ids if starts_with_end else tokenizer.with_start(ids)
                ))
            # Windows wrap around, so the stream ends with the token that it begins with.
            if not len(end):
                pieces.append(np.array(tokenizer.document_start[:1], np.int32))
            self._tokens[split] = np.concatenate(pieces)
        return self._tokens[split]

    def num_bytes(self, split: str) -> int:
        """Returns the bytes of text in the split, without end tokens."""
        return sum(len(text) for _, text in self.documents(split))

    def gzip_bits_per_byte(self, split: str) -> float:
        """Returns the bits per byte that `gzip -9` needs for the split.

        It compresses the documents, each followed by a zero byte for EOS, which counts as a byte.
        Compare it with loss / ln 2 of a model of bytes, and with that times `tokens_per_byte` for
        other tokens.
        """
        data = b"".join(text + b"\0" for _, text in self.documents(split))
        return 8 * len(gzip.compress(data, compresslevel=9, mtime=0)) / len(data)

    def tokens_per_byte(self, split: str) -> float:
        """Returns labels per byte of the stream, counting one byte for each document's end."""
        num_bytes = self.num_bytes(split) + len(self.documents(split))
        return (len(self.tokens(split)) - 1) / num_bytes

    def fingerprint(self) -> dict[str, Any]:
        """Returns a hash of all names, texts and splits (not paths), and of the tokenizer."""
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
            held_out = _percentile(name) < self.heldout_percent
            splits["heldout" if held_out else "train"].append((name, text))
        held_out_paragraphs = {
            paragraph for _, text in splits["heldout"] for paragraph in _paragraphs(text)
        }
        unseen = [(name, _without(text, held_out_paragraphs)) for name, text in splits["train"]]
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
    """Returns the paragraphs that are long enough to leak held-out text."""
    return [part for part in text.split(b"\n\n") if len(part) >= 40]


def _without(text: bytes, paragraphs: set[bytes]) -> bytes:
    return b"\n\n".join(part for part in text.split(b"\n\n") if part not in paragraphs)


def _percentile(name: str) -> int:
    """Returns a number from 0 to 99 that depends on the document's name alone."""
    # Digits in reverse order, so that 10 percent is the simple rule "hash % 10 == 0".
    tens, ones = divmod(int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100, 10)
    return 10 * ones + tens


def language_reference() -> list[tuple[str, bytes]]:
    """Returns CPython's language reference as (topic, text)."""
    from pydoc_data.topics import topics

    return [(name, topics[name].encode()) for name in sorted(topics)]


def read_documents(path: str) -> list[tuple[str, bytes]]:
    """Returns the blocks of a file as (`<basename>#<k>`, UTF-8), without a byte order mark.

    Raises:
        ConfigError: the file is empty or not UTF-8; names file and line.
    """
    with open(path, "rb") as file:
        data = file.read().removeprefix(codecs.BOM_UTF8)
    if not data:
        raise ConfigError(
            f"TextCorpus: the text file {path!r} is empty. Fill it, or leave it out of files."
        )
    with none_skipped():
        decode_utf8(data, f"TextCorpus: {path}", is_file=True)
    name = os.path.basename(path)
    return [(f"{name}#{k}", block) for k, block in enumerate(_blocks(data))]


def _blocks(data: bytes) -> list[bytes]:
    """Splits UTF-8 into blocks of at most BLOCK_BYTES, at line ends, or between characters."""
    blocks, start = [], 0
    while start < len(data):
        end = min(start + BLOCK_BYTES, len(data))
        if end < len(data):
            line_end = data.rfind(b"\n", start, end)
            if line_end >= 0:
                end = line_end + 1
            else:
                # Bytes 10xxxxxx continue a character.
                end -= next((n for n in range(4) if data[end - n] & 0xC0 != 0x80), 0)
        blocks.append(data[start:end])
        start = end
    return blocks
