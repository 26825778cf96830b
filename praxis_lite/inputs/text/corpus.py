"""A corpus of documents, split into those to train on and those held out, and their tokens."""

import functools
import gzip
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.inputs.sources.files.paths import matching_files
from praxis_lite.inputs.text.files import BLOCK_BYTES, read_documents
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.loading import as_tokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer

SPLITS = ("train", "heldout")


class TextCorpus:
    """Documents, read when first asked for; a fixed rule holds some of them out.

    The rule: the last two decimal digits of sha256(name), read backwards, are below
    heldout_percent; at 10 that is `sha256(name) % 10 == 0`. It depends on nothing but the name, so
    adding documents moves none of the others to the other side. A paragraph that is also in a
    held-out document is left out of training: the language reference repeats itself, and 19% of
    the held-out text would otherwise have been seen.

    Args:
        files: globs of text files, separated by commas; `**` and `~` work. Each file is cut, at
            line ends, into documents of at most 16 KiB named `<basename>#<k>`. None: CPython's
            language reference (`pydoc_data.topics`), a document per topic.
        heldout_percent: 0 to 100.
        tokenizer: of its tokens, or the directory of one; None: bytes.
    """

    def __init__(
        self, files: str | None = None, heldout_percent: int = 10,
        tokenizer: Tokenizer | str | None = None,
    ):
        self.files = files
        self.heldout_percent = heldout_percent
        self.tokenizer = as_tokenizer(tokenizer)

    def documents(self, split: str) -> list[tuple[str, bytes]]:
        """Returns the (name, text) of each document of 'train' or 'heldout', in a fixed order.

        Raises:
            ConfigError: another split; no documents in it; files that are missing, empty or
                unreadable.
        """
        require_choice("The split of a TextCorpus", split, SPLITS)
        documents = self._splits[split]
        if not documents:
            total = sum(map(len, self._splits.values()))
            raise ConfigError(
                f"TextCorpus: the {split!r} split of {self._source} is empty: at heldout_percent "
                f"{self.heldout_percent} all {total} documents fall to the other split. Change "
                f"heldout_percent, or give more text (files are cut into documents of "
                f"{BLOCK_BYTES // 1024} KiB)."
            )
        return documents

    def tokens(self, split: str) -> np.ndarray:
        """Returns the stream EOS, document, EOS, document, ..., EOS as int32.

        All but the first are labels; of bytes these are num_bytes + one EOS per document. A BOS
        that the tokenizer puts before a text is before each document as well.
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
            # The stream is read as a circle: it ends with what it begins with.
            if not len(end):
                pieces.append(np.array(tokenizer.document_start[:1], np.int32))
            self._tokens[split] = np.concatenate(pieces)
        return self._tokens[split]

    def num_bytes(self, split: str) -> int:
        """Returns the bytes of text in the split, without the ends of documents."""
        return sum(len(text) for _, text in self.documents(split))

    def gzip_bits_per_byte(self, split: str) -> float:
        """Returns the bits per byte that `gzip -9` needs for the split.

        It compresses the documents, each followed by a zero byte for EOS, which counts as a byte. A
        model's mean loss over the `tokens` of bytes has the same divisor: loss / ln 2 compares with
        this figure. The loss of other tokens does so times `tokens_per_byte`.
        """
        data = b"".join(text + b"\0" for _, text in self.documents(split))
        return 8 * len(gzip.compress(data, compresslevel=9, mtime=0)) / len(data)

    def tokens_per_byte(self, split: str) -> float:
        """Returns the labels per byte of the stream, a byte added for each end of a document."""
        num_bytes = self.num_bytes(split) + len(self.documents(split))
        return (len(self.tokens(split)) - 1) / num_bytes

    def fingerprint(self) -> dict[str, Any]:
        """Returns the hash of all names and texts with their splits, but not of paths.

        And what decides their tokens, if these are not bytes.
        """
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
    def _tokens(self) -> dict[str, np.ndarray]:
        return {}

    @functools.cached_property
    def _splits(self) -> dict[str, list[tuple[str, bytes]]]:
        require_percent("TextCorpus.heldout_percent", self.heldout_percent)
        splits: dict[str, list[tuple[str, bytes]]] = {split: [] for split in SPLITS}
        for name, text in self._read():
            held_out = _place(name) < self.heldout_percent
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

    def _read(self) -> Iterable[tuple[str, bytes]]:
        if self.files is None:
            return language_reference()
        files = matching_files(self.files)
        return [document for path in files for document in read_documents(path)]


def require_percent(setting: str, found: Any) -> None:
    """Raises ConfigError unless a setting is a whole number of percent."""
    is_right = hasattr(found, "__index__") and 0 <= found <= 100
    require(is_right, setting, found, "a whole number from 0 to 100")


def _paragraphs(text: bytes) -> list[bytes]:
    """Returns the paragraphs long enough to give something away when they stand elsewhere too."""
    return [part for part in text.split(b"\n\n") if len(part) >= 40]


def _without(text: bytes, paragraphs: set[bytes]) -> bytes:
    return b"\n\n".join(part for part in text.split(b"\n\n") if part not in paragraphs)


def _place(name: str) -> int:
    """Returns the document's place in 0..99, fixed by its name alone."""
    # Backwards, so that a tenth is the plain rule "hash % 10 == 0".
    tens, ones = divmod(int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100, 10)
    return 10 * ones + tens


def language_reference() -> list[tuple[str, bytes]]:
    """Returns CPython's language reference: (topic, text) each.

    Raises:
        ConfigError: this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "TextCorpus: files is None, which means the language reference that comes with Python "
            "(pydoc_data.topics), but this Python has none. Set files to a glob of text files."
        ) from error
    return [(name, topics[name].encode()) for name in sorted(topics)]
