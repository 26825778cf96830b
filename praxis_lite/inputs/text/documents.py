"""Tokenized documents of a source of examples, stored on disk or tokenized at each use."""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.inputs.base import NumberedPipeline
from praxis_lite.inputs.sources.base import Example, Part, Source, settings_alone
from praxis_lite.inputs.sources.cache import Made
from praxis_lite.inputs.sources.derived import DerivedPart, code_of, derived, left_out
from praxis_lite.inputs.sources.faults import applied
from praxis_lite.inputs.text.conversations import Tokens
from praxis_lite.inputs.text.corpus import SPLITS, require_percent
from praxis_lite.inputs.text.encoding import KEYS, encoded
from praxis_lite.inputs.text.pairs import Pair
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.loading import as_tokenizer
from praxis_lite.inputs.tokenizers.plain import TokenIds


@dataclasses.dataclass(eq=False)
class Documents:
    """The documents of a source, tokenized once on all cores and cached next to its files.

    The first pass reports faults of any example, drops examples for which `keep` returns False,
    and measures each document, so that any row of packed documents can be found without reading
    others. If interrupted it resumes; later it reads only changed files.

    Args:
      source: of the examples.
      holds: the format of examples: "text"; "ids", which are tokenized already; "messages", a
        conversation, trained on the assistant's messages; "completion", trained on, after a
        "prompt", which is not; conversations of ShareGPT ("sharegpt": `conversations`) and Alpaca
        ("alpaca": `instruction`, `input`, `output`); or a "preference": `prompt`, `chosen` and
        `rejected`, for PreferenceData.
      key: of the value in an example. None: the name of the format.
      tokenizer: or its directory; None: bytes, and for ids no tokenizer.
      transform: an importable function from an example to an example, applied first.
      keep: an importable predicate of examples.
      ignored_keys: keys of conversations or preferences that are not read, such as "id"; any other
        unknown key is an error.
      heldout_percent: of the documents, chosen by their content, are in the split "heldout".
      ahead: True: tokens are stored on disk. False: only lengths are, and a document is read and
        tokenized at each use.
    """

    source: Source
    holds: str = "text"
    _: dataclasses.KW_ONLY
    key: str | None = None
    tokenizer: Tokenizer | str | None = None
    transform: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    keep: Callable[[Mapping[str, Any]], bool] | None = None
    ignored_keys: Sequence[str] = ()
    heldout_percent: int = 0
    ahead: bool = True

    def __post_init__(self) -> None:
        if self.tokenizer is None and self.holds == "ids":
            self.tokenizer = TokenIds()
        self.tokenizer = as_tokenizer(self.tokenizer)

    def check(self) -> None:
        """Prepares all documents. Raises ConfigError for a fault in any of them."""
        require_choice("Documents.holds", self.holds, KEYS)
        has_names = self.key is None or KEYS[self.holds] is not None
        require(
            has_names, "Documents.key", self.key, f"None: {self.holds} has fixed keys",
            "Rename the keys with a transform.",
        )
        require(
            not isinstance(self.ignored_keys, str), "Documents.ignored_keys", self.ignored_keys,
            "a list of keys",
        )
        require_percent("Documents.heldout_percent", self.heldout_percent)
        require(
            isinstance(self.source, Source), "Documents.source", self.source,
            "a source of examples, such as JsonLines('data/*.jsonl')",
        )
        _ = self.left_out

    @functools.cached_property
    def parts(self) -> list[DerivedPart]:
        """The cached record of each part of the source."""
        self.source.check()
        recipe = {
            "version": 3, "holds": self.holds, "key": self.key, "ahead": self.ahead,
            "ignored_keys": sorted(self.ignored_keys),
            "tokenizer": self.tokenizer.fingerprint(),
            "chat": None if self.tokenizer.chat is None else self.tokenizer.chat.sources,
            "transform": code_of(self.transform), "keep": code_of(self.keep),
        }
        kind = "tokens" if self.ahead else "lengths"
        return derived(self.source, kind, recipe, self._made, "tokenizing")

    @functools.cached_property
    def left_out(self) -> dict[str, int]:
        """The number of left out examples by reason.

        Reasons are a fault; "filtered" by `keep`; "empty"; or "too_short", a single id.
        """
        return left_out(self.source, self.parts)

    def _made(self, part: Part) -> Made:
        """Returns the cached record of the examples of a part."""
        documents: list[Tokens] = []
        chosen_lengths, rows, percentiles, missing = [], [], [], collections.Counter()
        largest, largest_row = -1, -1

        def made(example: Example, number: int) -> tuple[Tokens | Pair, int] | str:
            """Returns the tokens of an example, and a number from 0 to 99 by its content."""
            tokens = self._encode(example, number)
            if isinstance(tokens, str):
                return tokens
            if isinstance(tokens, Pair):
                content = json.dumps(example, sort_keys=True, default=repr).encode()
                return tokens, int(hashlib.sha256(content).hexdigest(), 16) % 100
            digest = hashlib.sha256(tokens.ids.tobytes() + tokens.is_answer.tobytes())
            return tokens, int.from_bytes(digest.digest()[:8], "little") % 100

        for number, (tokens, percentile) in self.source.made_of(part, made, missing):
            if isinstance(tokens, Pair):
                chosen_lengths.append(len(tokens.chosen.ids))
                tokens = Tokens(*map(np.concatenate, zip(*tokens, strict=True)))
            documents.append(tokens)
            rows.append(number - part.start)
            percentiles.append(percentile)
            if (most := int(tokens.ids.max())) > largest:
                largest, largest_row = most, number - part.start
        arrays = {
            "lengths": np.array([len(document.ids) for document in documents], np.int32),
            "rows": np.array(rows, np.int32),
            "places": np.array(percentiles, np.uint8),
        }
        if self.holds == "preference":
            arrays["chosen_lengths"] = np.array(chosen_lengths, np.int32)
        if self.ahead:
            ids = np.concatenate([np.empty(0, np.int32), *(document.ids for document in documents)])
            arrays["ids"] = ids.astype(np.min_scalar_type(max(largest, 0)))
            if self.has_answers:
                arrays["answers"] = np.concatenate(
                    [np.empty(0, bool), *(document.is_answer for document in documents)]
                )
        values = {"left_out": dict(missing), "largest": largest, "largest_row": largest_row}
        return values, arrays

    def _encode(self, example: Mapping[str, Any], number: int) -> Tokens | Pair | str:
        """Returns the tokens of an example, or the reason why it is left out."""
        where = self.source.where(number)
        if self.transform is not None:
            example = applied(self.transform, example, where)
        if self.keep is not None and not applied(self.keep, example, where):
            return "filtered"
        tokens = encoded(
            self.holds, self.key, example, self.tokenizer, where, self.ignored_keys
        )
        if tokens is None:
            return "empty"
        # A single token has no label.
        return "too_short" if isinstance(tokens, Tokens) and len(tokens.ids) < 2 else tokens

    @property
    def has_answers(self) -> bool:
        """Whether only parts of documents are trained on."""
        return self.holds not in ("text", "ids")

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """int32[documents]: number of ids of each document."""
        return self._joined("lengths", np.int32)

    def _joined(self, name: str, dtype: type) -> np.ndarray:
        """Returns the concatenation of an array of all parts."""
        return np.concatenate([np.empty(0, dtype), *(p.arrays[name] for p in self.parts)])

    @functools.cached_property
    def first_of_part(self) -> np.ndarray:
        """int64[parts + 1]: the number of the first document of each part."""
        return np.cumsum([0, *(len(p.arrays["lengths"]) for p in self.parts)], dtype=np.int64)

    @functools.cached_property
    def _starts(self) -> list[np.ndarray]:
        """int64[documents + 1] of each part: the offset of each document's ids."""
        return [
            np.concatenate([[0], np.cumsum(p.arrays["lengths"], dtype=np.int64)])
            for p in self.parts
        ]

    def of_split(self, split: str) -> np.ndarray:
        """Returns int64[n]: the numbers of the documents of 'train' or 'heldout'."""
        require_choice("split", split, SPLITS)
        is_held_out = self._joined("places", np.uint8) < self.heldout_percent
        return np.flatnonzero(is_held_out == (split == "heldout"))

    def __getitem__(self, number: int) -> Tokens:
        """Returns the tokens of a document; its ids are a view of the file on disk."""
        part, within = self._part_of(number)
        arrays = self.parts[part].arrays
        if not self.ahead:
            row = self._row_of(number)
            tokens = self._encode(self.source[row], row)
            if isinstance(tokens, str) or len(tokens.ids) != arrays["lengths"][within]:
                raise ConfigError(
                    f"{self.source.where(row)} gives another document than when its length was "
                    "measured. Let transform and keep depend on the example alone."
                )
            return tokens
        start, stop = self._starts[part][within : within + 2]
        ids = arrays["ids"][start:stop]
        answers = arrays.get("answers")
        return Tokens(ids, None if answers is None else answers[start:stop])

    @functools.cached_property
    def chosen_lengths(self) -> np.ndarray:
        """int32[documents]: of preferences, the number of ids of the chosen side."""
        return self._joined("chosen_lengths", np.int32)

    def pair(self, number: int) -> Pair:
        """Returns the tokens of a preference."""
        tokens, size = self[number], self.chosen_lengths[number]
        return Pair(*(
            Tokens(tokens.ids[side], tokens.is_answer[side])
            for side in (slice(0, size), slice(size, None))
        ))

    def where(self, number: int) -> str:
        """Returns the location of a document in the source: "file:line"."""
        return self.source.where(self._row_of(number))

    def _part_of(self, number: int) -> tuple[int, int]:
        """Returns the part that has a document, and the document's number there."""
        part = int(np.searchsorted(self.first_of_part, number, side="right")) - 1
        return part, number - int(self.first_of_part[part])

    def _row_of(self, number: int) -> int:
        """Returns the number of a document's example in the source."""
        part, within = self._part_of(number)
        return self.parts[part].part.start + int(self.parts[part].arrays["rows"][within])

    def largest_id(self) -> tuple[int, str]:
        """Returns the largest id of all documents, and its first location: "file:line"."""
        most = max(self.parts, key=lambda item: item.values["largest"])
        if most.values["largest"] < 0:
            return 0, ""
        where = self.source.where(most.part.start + most.values["largest_row"])
        return most.values["largest"], where

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that decide the documents, with digests of files and lengths."""
        # Independent of `ahead`.
        of_parts = [[p.digests[name] for name in ("lengths", "rows", "places")] for p in self.parts]
        digest = hashlib.sha256(json.dumps(of_parts).encode())
        return {
            "source": self.source.fingerprint(), "holds": self.holds,
            **self.tokenizer.fingerprint(), "heldout_percent": self.heldout_percent,
            "documents": int(self.first_of_part[-1]), "left_out": self.left_out,
            "sha256": digest.hexdigest(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return settings_alone(self)


class DocumentPipeline(NumberedPipeline):
    """A pipeline of the ids of `documents`."""

    documents: Documents

    def largest_id(self) -> int:
        """Returns the largest id of all documents."""
        return self.documents.largest_id()[0]

    def place_of_largest_id(self) -> str:
        """Returns the first location of the largest id: "file:line"."""
        return self.documents.largest_id()[1]
