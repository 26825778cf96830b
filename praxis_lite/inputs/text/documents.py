"""Tokenizes the examples in a source into documents, and caches them on disk."""

import collections
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.inputs.sources.base import Example, Part, Source, picklable_state
from praxis_lite.inputs.sources.cache import Contents
from praxis_lite.inputs.sources.derived import (
    DerivedPart,
    derive_parts,
    function_recipe,
    num_left_out,
)
from praxis_lite.inputs.sources.faults import apply_to_example
from praxis_lite.inputs.text.conversations import Tokens
from praxis_lite.inputs.text.corpus import SPLITS, require_percent
from praxis_lite.inputs.text.encoding import KEYS, encoded
from praxis_lite.inputs.text.pairs import Pair
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.loading import as_tokenizer
from praxis_lite.inputs.tokenizers.plain import TokenIds


@dataclasses.dataclass(eq=False)
class Documents:
    """The tokenized documents of a source, computed once on all cores and cached on disk.

    During the first pass over the source, invalid examples are reported, examples for which `keep`
    returns False are dropped, and the length of each document is recorded. With all lengths known,
    any row of packed documents can be built without reading other rows. An interrupted pass is
    resumed, and later passes only read files that have changed.

    Args:
      source: Source of the examples.
      format: Format of the examples:
        * "text": a string.
        * "ids": token ids, which are all trained on.
        * "messages": a conversation; only the assistant's messages are trained on.
        * "completion": `prompt` and `completion`; only the completion is trained on.
        * "sharegpt": a conversation in ShareGPT's format, with the key `conversations`.
        * "alpaca": Alpaca's format, with the keys `instruction`, `input` and `output`.
        * "preference": `prompt`, `chosen` and `rejected`, for PreferenceData.
      key: Key of the value in an example. If None, the name of the format is used.
      tokenizer: A tokenizer or its directory. If None, tokens are bytes, and "ids" are used
        unchanged.
      transform: Importable function that maps an example to an example, applied first.
      keep: Importable predicate on examples. Examples for which it returns False are dropped.
      ignored_keys: Keys of conversations or preference pairs to ignore, such as "id"; any other
        unknown key is an error. In rows of ids, only masks that exclude tokens are errors.
      heldout_percent: Percentage of documents in the "heldout" split, selected by a hash of their
        content.
      cache_tokens: Whether to cache tokens on disk. If False, only lengths are cached, and
        documents are read and tokenized on each access.
    """

    source: Source
    format: str = "text"
    _: dataclasses.KW_ONLY
    key: str | None = None
    tokenizer: Tokenizer | str | None = None
    transform: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    keep: Callable[[Mapping[str, Any]], bool] | None = None
    ignored_keys: Sequence[str] = ()
    heldout_percent: int = 0
    cache_tokens: bool = True

    def __post_init__(self) -> None:
        if self.tokenizer is None and self.format == "ids":
            self.tokenizer = TokenIds()
        self.tokenizer = as_tokenizer(self.tokenizer)

    @property
    def _tokenizer(self) -> Tokenizer:
        return as_tokenizer(self.tokenizer)  # Unchanged: `__post_init__` has converted it.

    def check(self) -> None:
        """Reads or computes the cached documents. Raises ConfigError if an example is invalid."""
        require_choice("Documents.format", self.format, KEYS)
        if self.key is not None and KEYS[self.format] is None:
            raise ConfigError(
                f"Documents.key is {self.key!r}, but the format {self.format!r} has fixed keys. "
                "Set key to None, and rename the keys of the examples with a transform."
            )
        require(
            not isinstance(self.ignored_keys, str),
            "Documents.ignored_keys",
            self.ignored_keys,
            "a list of keys",
        )
        require_percent("Documents.heldout_percent", self.heldout_percent)
        require(
            isinstance(self.source, Source),
            "Documents.source",
            self.source,
            "a source of examples, such as JsonLines('data/*.jsonl')",
        )
        _ = self.left_out

    @functools.cached_property
    def parts(self) -> list[DerivedPart]:
        """The cached tokens, or only the lengths, for each part of the source."""
        self.source.check()
        chat = self._tokenizer.chat
        recipe = {
            "version": 4,
            "holds": self.format,
            "key": self.key,
            "ahead": self.cache_tokens,
            "ignored_keys": sorted(self.ignored_keys),
            "tokenizer": self._tokenizer.fingerprint(),
            "chat": None if chat is None else [*chat.sources, *chat.reserved],
            "transform": function_recipe(self.transform),
            "keep": function_recipe(self.keep),
        }
        kind = "tokens" if self.cache_tokens else "lengths"
        parts = derive_parts(self.source, kind, recipe, self._encode_part, "tokenizing")
        self._log_special_tokens(parts)
        return parts

    def _log_special_tokens(self, parts: Sequence[DerivedPart]) -> None:
        """Logs how many texts have special tokens within; conversations are checked when read."""
        # Caches of earlier versions do not contain the counts.
        counted = [part for part in parts if part.values.get("num_with_special")]
        if counted:
            first = counted[0]
            _log.info(
                "%s: %s texts contain the names of special tokens, which are read as these tokens, "
                "or characters that the tokenizer does not know; the first of these tokens is %r "
                "in %s",
                self.source.location,
                f"{sum(part.values['num_with_special'] for part in counted):,}",
                self._tokenizer.decode([first.values["first_special"]]),
                self.source.where(first.part.start + first.values["row_of_special"]),
            )

    @functools.cached_property
    def left_out(self) -> dict[str, int]:
        """The number of skipped examples for each reason.

        A reason is the name of a fault, "filtered" (by `keep`), "empty", or "too_short" (one id).
        """
        return num_left_out(self.source, self.parts)

    def _encode_part(self, part: Part) -> Contents:
        """Returns the cache entry for a part's documents."""
        documents: list[Tokens] = []
        chosen_lengths, rows, percentiles = [], [], []
        left_out: collections.Counter[str] = collections.Counter()
        largest, largest_row = -1, -1
        num_with_special, first_special, row_of_special = 0, -1, -1
        special_ids = self._special_ids_in_text

        def encode(example: Example, number: int) -> tuple[Tokens | Pair, int] | str:
            """Returns an example's tokens and hash percentile (0 to 99), or a reason to skip it."""
            tokens = self._encode(example, number)
            if isinstance(tokens, str):
                return tokens
            if isinstance(tokens, Pair):
                # A hash of the content, so new examples do not move others between splits.
                content = json.dumps(example, sort_keys=True, default=repr).encode()
                return tokens, int(hashlib.sha256(content).hexdigest(), 16) % 100
            digest = hashlib.sha256(tokens.ids.tobytes() + tokens.is_answer.tobytes())
            return tokens, int.from_bytes(digest.digest()[:8], "little") % 100

        for number, (tokens, percentile) in self.source.map_part(part, encode, left_out):
            if isinstance(tokens, Pair):
                # A pair is stored as one document. `chosen_lengths` determines where it is split.
                chosen_lengths.append(len(tokens.chosen.ids))
                tokens = _concatenate(tokens)
            documents.append(tokens)
            rows.append(number - part.start)
            percentiles.append(percentile)
            if (largest_here := int(tokens.ids.max())) > largest:
                largest, largest_row = largest_here, number - part.start
            # Special tokens at the start and the end may have been added to the text.
            within = tokens.ids[1:-1] if special_ids else tokens.ids[:0]
            special = within[np.isin(within, special_ids)]
            if len(special):
                num_with_special += 1
                if first_special < 0:
                    first_special, row_of_special = int(special[0]), number - part.start
        arrays: dict[str, np.ndarray] = {
            "lengths": np.array([len(document.ids) for document in documents], np.int32),
            "rows": np.array(rows, np.int32),
            "places": np.array(percentiles, np.uint8),
        }
        if self.format == "preference":
            arrays["chosen_lengths"] = np.array(chosen_lengths, np.int32)
        if self.cache_tokens:
            ids = np.concatenate([np.empty(0, np.int32), *(document.ids for document in documents)])
            # Store ids in the smallest unsigned integers.
            arrays["ids"] = ids.astype(np.min_scalar_type(max(largest, 0)))
            if self.has_answers:
                arrays["answers"] = np.concatenate(
                    [np.empty(0, bool), *(document.is_answer for document in documents)]
                )
        values: dict[str, Any] = {
            "left_out": dict(left_out),
            "largest": largest,
            "largest_row": largest_row,
            "num_with_special": num_with_special,
            "first_special": first_special,
            "row_of_special": row_of_special,
        }
        return values, arrays

    @property
    def _special_ids_in_text(self) -> list[int]:
        """The special tokens to count in the texts; empty for other formats."""
        is_text = self.format in ("text", "completion")
        return sorted(self._tokenizer.special_ids) if is_text else []

    def _encode(self, example: Mapping[str, Any], number: int) -> Tokens | Pair | str:
        """Returns the tokens of an example, or the reason to skip it."""
        where = self.source.where(number)
        if self.transform is not None:
            example = apply_to_example(self.transform, example, where)
            name = f"The result of Documents.transform for {where}"
            require(isinstance(example, Mapping), name, example, "a dict such as {'text': ...}")
        if self.keep is not None and not apply_to_example(self.keep, example, where):
            return "filtered"
        tokens = encoded(self.format, self.key, example, self._tokenizer, where, self.ignored_keys)
        if tokens is None:
            return "empty"
        # Training needs at least two tokens: an input and its label.
        return "too_short" if isinstance(tokens, Tokens) and len(tokens.ids) < 2 else tokens

    @property
    def has_answers(self) -> bool:
        """Whether training uses only part of a document's labels, such as the answers."""
        return self.format not in ("text", "ids")

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """int32[documents]: the number of token ids in each document."""
        return self._concatenated("lengths", np.int32)

    def _concatenated(self, name: str, dtype: type) -> np.ndarray:
        """Concatenates the arrays `name` from all parts."""
        return np.concatenate([np.empty(0, dtype), *(p.arrays[name] for p in self.parts)])

    @functools.cached_property
    def first_of_part(self) -> np.ndarray:
        """int64[parts + 1]: the index of each part's first document, then the total."""
        return np.cumsum([0, *(len(p.arrays["lengths"]) for p in self.parts)], dtype=np.int64)

    @functools.cached_property
    def _starts(self) -> list[np.ndarray]:
        """For each part, int64[documents + 1]: the offsets of its documents in the array of ids."""
        return [
            np.concatenate([[0], np.cumsum(p.arrays["lengths"], dtype=np.int64)])
            for p in self.parts
        ]

    def of_split(self, split: str) -> np.ndarray:
        """Returns the indices of the documents in a split, 'train' or 'heldout', as int64[n]."""
        require_choice("split", split, SPLITS)
        is_held_out = self._concatenated("places", np.uint8) < self.heldout_percent
        return np.flatnonzero(is_held_out == (split == "heldout"))

    def __getitem__(self, number: int) -> Tokens:
        """Returns the tokens in a document, as views of memory-mapped files if they are cached."""
        part, offset = self._part_and_offset(number)
        arrays = self.parts[part].arrays
        if not self.cache_tokens:
            index = self._source_index(number)
            tokens = self._encode(self.source[index], index)
            if isinstance(tokens, Pair):
                tokens = _concatenate(tokens)
            if isinstance(tokens, str) or len(tokens.ids) != arrays["lengths"][offset]:
                raise ConfigError(
                    f"{self.source.where(index)} has different tokens than in the first pass. "
                    "`transform` and `keep` must depend only on the example."
                )
            return tokens
        start, stop = self._starts[part][offset : offset + 2]
        ids = arrays["ids"][start:stop]
        if self.has_answers:
            return Tokens(ids, arrays["answers"][start:stop])
        return Tokens(ids, np.broadcast_to(np.True_, len(ids)))

    @functools.cached_property
    def chosen_lengths(self) -> np.ndarray:
        """int32[documents]: the number of ids on the chosen side of each preference pair."""
        return self._concatenated("chosen_lengths", np.int32)

    def pair(self, number: int) -> Pair:
        """Returns the tokens in a preference pair."""
        tokens, size = self[number], self.chosen_lengths[number]
        return Pair(
            *(
                Tokens(tokens.ids[side], tokens.is_answer[side])
                for side in (slice(0, size), slice(size, None))
            )
        )

    def where(self, number: int) -> str:
        """Returns the location of a document in the source: "file:line"."""
        return self.source.where(self._source_index(number))

    def _part_and_offset(self, number: int) -> tuple[int, int]:
        """Returns the index of a document's part, and the document's index in it."""
        part = int(np.searchsorted(self.first_of_part, number, side="right")) - 1
        return part, number - int(self.first_of_part[part])

    def _source_index(self, number: int) -> int:
        """Returns the index of a document's example in the source."""
        part, offset = self._part_and_offset(number)
        return self.parts[part].part.start + int(self.parts[part].arrays["rows"][offset])

    def largest_id(self) -> tuple[int, str]:
        """Returns the largest token id in all documents and its first location, "file:line"."""
        part = max(self.parts, key=lambda part: part.values["largest"])
        if part.values["largest"] < 0:
            return 0, ""
        where = self.source.where(part.part.start + part.values["largest_row"])
        return part.values["largest"], where

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that determine the documents, with digests of files and lengths."""
        # The digests do not cover ids, so that the fingerprint does not depend on `cache_tokens`.
        digests = [[p.digests[name] for name in ("lengths", "rows", "places")] for p in self.parts]
        digest = hashlib.sha256(json.dumps(digests).encode())
        return {
            "source": self.source.fingerprint(),
            "holds": self.format,
            **self._tokenizer.fingerprint(),
            "heldout_percent": self.heldout_percent,
            "documents": int(self.first_of_part[-1]),
            "left_out": self.left_out,
            "sha256": digest.hexdigest(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self)


def _concatenate(pair: Pair) -> Tokens:
    """Returns the tokens on the chosen side, followed by the tokens on the rejected side."""
    return Tokens(
        np.concatenate([side.ids for side in pair]),
        np.concatenate([side.is_answer for side in pair]),
    )


_log = logging.getLogger(__name__)
