"""A pipeline of packed or padded rows of documents, which do not attend to each other."""

import dataclasses
import functools
import hashlib
import json
import logging
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.inputs.base import lm_spec, spec_of
from praxis_lite.inputs.mixing.shuffle import epoch_order
from praxis_lite.inputs.sources import cache
from praxis_lite.inputs.text.corpus import SPLITS
from praxis_lite.inputs.text.document_pipeline import DocumentPipeline
from praxis_lite.inputs.text.documents import Documents
from praxis_lite.inputs.text.packing import (
    WINDOW,
    Packing,
    TooLong,
    first_fit,
    unpacked,
    without_gaps,
)
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.loading import as_tokenizer

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(eq=False)
class PackedText(DocumentPipeline):
    """Rows of packed documents: `ids`, `labels`, `weights`, `segment_ids`, `segment_pos` [B, T].

    `segment_ids` number the documents in a row from 1 and are 0 for padding; tokens attend only to
    tokens in the same segment. `segment_pos` numbers the tokens in each segment from 0. `weights`
    are 1 for the labels to train on: in a conversation, the assistant's messages.

    Documents are assigned to rows once, in an order drawn from the seed, and rows are reshuffled
    every epoch. Any row can be built from its index alone, so a job resumes without replaying data,
    on any number of hosts.

    Args:
      documents: Documents to pack.
      split: Split of the documents, 'train' or 'heldout'.
      batch_size: Number of rows in the global batch. With `bucket_lengths`, a batch of rows of
        length T has `batch_size * (seq_len // T)` rows.
      seq_len: Number of labels per row, T, or the maximum with `bucket_lengths`.
      seed: Seed of the order of documents and rows.
      shuffle: True for endless batches; False for one pass over the documents in file order.
      packing: Whether a row may contain several documents. If False, each document has a separate
        row, or several rows if the document is longer than a row.
      split_documents: If True, every row is filled, and a document that does not fit continues in
        the next row. If False, only documents that are longer than a row are split.
      too_long: What to do with documents of more than seq_len + 1 ids if split_documents is False:
        "split" them into pieces, "refuse" them with an error, "drop" them, or "cut" them to this
        length.
      window: Maximum number of incomplete rows that are considered when a document is placed, if
        split_documents is False.
      bucket_lengths: Lengths below seq_len, in increasing order, such as (128, 256). If not empty,
        each row is padded to the smallest sufficient length among these and seq_len, and a batch
        contains rows of one length. Each length is a shape for which the steps are compiled.
        Requires packing=False.
    """

    documents: Documents
    split: str
    batch_size: int
    seq_len: int
    seed: int = 0
    _: dataclasses.KW_ONLY
    shuffle: bool
    packing: bool = True
    split_documents: bool = False
    too_long: TooLong = "split"
    window: int = WINDOW
    bucket_lengths: Sequence[int] = ()

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "window")
        require_choice("PackedText.split", self.split, SPLITS)
        require_choice("PackedText.too_long", self.too_long, typing.get_args(TooLong))
        if self.split_documents and not self.packing:
            raise ConfigError(
                "PackedText.split_documents=True cannot be combined with packing=False. Set "
                "split_documents=False or packing=True."
            )
        if self.bucket_lengths and self.packing:
            raise ConfigError(
                f"PackedText.bucket_lengths={self.bucket_lengths} cannot be combined with "
                "packing=True, which fills rows of seq_len with several documents. Set "
                "packing=False or bucket_lengths=()."
            )
        if self.documents.format == "preference":
            raise ConfigError(
                "PackedText does not support documents in the format 'preference'. Use "
                "PreferenceData."
            )
        self.documents.check()
        if not self.table.num_rows:
            left_out = self.documents.left_out
            raise ConfigError(
                f"PackedText: the {self.split!r} split is empty: {len(self.documents.lengths):,} "
                "documents in all splits, "
                f"heldout_percent {self.documents.heldout_percent}, skipped: {left_out or 'none'}. "
                "Add documents, or change heldout_percent, keep or too_long."
            )
        _ = self.buckets

    @functools.cached_property
    def table(self) -> Packing:
        """The assignment of documents to rows, which is cached next to the tokens."""
        settings = {**self.fingerprint(), "batch_size": None, "bucket_lengths": None}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        folder, name = self.documents.source.cache_folder(), f"rows-{digest[:16]}"

        def write_table(_: list[int]) -> None:
            message, table = self._pack()
            cache.write(folder, name, {"said": message}, table._asdict())

        (entry,) = cache.entries(folder, [name], write_table)
        _log.info("%s, %s", self.documents.source.location, entry.values["said"])
        return Packing(**entry.arrays)

    def _pack(self) -> tuple[str, Packing]:
        """Returns a log message and the assignment of documents to rows."""
        chosen, changes = self.documents.of_split(self.split), list[str]()
        if self.shuffle:
            chosen = chosen[epoch_order(self.seed, 0, len(chosen))]
        # The first token of a document is not a label.
        counts = self.documents.lengths[chosen] - 1
        is_long = counts > self.seq_len
        if not self.split_documents and is_long.any():
            too_long = chosen[is_long]
            if self.too_long == "refuse":
                self._refuse(int(too_long[0]))
            # A split text loses little, but a split answer no longer follows its question.
            if self.too_long == "split" and self.documents.has_answers:
                changes.append(f"{len(too_long):,} split")
            if self.too_long == "drop":
                chosen, counts = chosen[~is_long], counts[~is_long]
                changes.append(f"{len(too_long):,} dropped")
            if self.too_long == "cut":
                counts = counts.clip(max=self.seq_len)
                changes.append(f"{len(too_long):,} cut")
                if num_unlearned := sum(map(self._is_unlearned_after_cut, too_long.tolist())):
                    changes.append(f"{num_unlearned:,} of them before the first answer")
        if self.split_documents:
            packing = without_gaps(counts, self.seq_len)
        elif self.packing:
            packing = first_fit(counts, self.seq_len, self.window)
        else:
            packing = unpacked(counts, self.seq_len)
        num_labels = int(packing.counts.sum(dtype=np.int64))
        full = 100 * num_labels / max(1, packing.num_rows * self.seq_len)
        longer = f"; longer than a row: {', '.join(changes)}" if changes else ""
        message = (
            f"{self.split}: {len(chosen):,} documents, {num_labels:,} tokens, in "
            f"{packing.num_rows:,} rows of {self.seq_len:,}, {full:.1f}% full{longer}"
        )
        return message, packing._replace(documents=chosen[packing.documents])

    def _is_unlearned_after_cut(self, document: int) -> bool:
        """Returns whether no answer begins within a document's first seq_len labels."""
        if not self.documents.has_answers:
            return False
        return not self.documents[document].is_answer[1 : self.seq_len + 1].any()

    def _refuse(self, document: int) -> None:
        length = int(self.documents.lengths[document])
        raise ConfigError(
            f"PackedText: {self.documents.where(document)} has {length:,} tokens, more than "
            f"seq_len + 1 = {self.seq_len + 1}. Raise seq_len, or set too_long to 'split', 'drop' "
            "or 'cut'."
        )

    def row_lengths(self) -> np.ndarray:
        return self.table.counts  # With buckets, a row is a single piece.

    @property
    def num_examples(self) -> int:
        return self.table.num_rows

    def spec_of_shape(self, num_rows: int, length: int) -> "dict[str, jax.ShapeDtypeStruct]":
        shape = (num_rows, length)
        segments = spec_of(segment_ids=(shape, np.int32), segment_pos=(shape, np.int32))
        return {**lm_spec(*shape), **segments}

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        rows, length = self.rows_of_batch(index, rows), self.length_of_batch(index)
        count = rows.stop - rows.start
        names = ("ids", "labels", "segment_ids", "segment_pos")
        batch = {name: np.zeros((count, length), np.int32) for name in names}
        batch["weights"] = np.zeros((count, length), np.float32)
        positions = np.arange(length, dtype=np.int32)
        # A row consists of consecutive pieces in the table, each of which is part of a document.
        for row, number in enumerate(self.example_indices(index, rows)):
            first_piece, stop_piece = self.table.starts[number : number + 2].tolist()
            ids, labels, segment_ids, segment_pos, weights = (
                batch[name][row] for name in (*names, "weights")
            )
            start = 0
            # Segments count from 1, because 0 marks padding at the end of the row.
            for segment, piece in enumerate(range(first_piece, stop_piece), 1):
                label, size = int(self.table.firsts[piece]), int(self.table.counts[piece])
                tokens, is_answer = self.documents[self.table.documents[piece]]
                end = start + size
                ids[start:end] = tokens[label : label + size]
                labels[start:end] = tokens[label + 1 : label + size + 1]
                segment_ids[start:end] = segment
                segment_pos[start:end] = positions[:size]
                weights[start:end] = is_answer[label + 1 : label + size + 1]
                start = end
        return batch

    @property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]  # Read-only property.
        return as_tokenizer(self.documents.tokenizer)

    def tokens_per_row(self) -> float:
        """Returns the mean number of labels with nonzero weight per row."""
        rows = self.table
        if not self.documents.has_answers:
            return int(rows.counts.sum(dtype=np.int64)) / rows.num_rows
        num_answers = sum(
            int(self.documents[document].is_answer[first + 1 : first + count + 1].sum())
            for document, first, count in zip(*map(np.ndarray.tolist, rows[1:]), strict=True)
        )
        return num_answers / rows.num_rows

    def fingerprint(self) -> dict[str, Any]:
        return self.settings_fingerprint(
            "split",
            "batch_size",
            "seq_len",
            "seed",
            "shuffle",
            "packing",
            "split_documents",
            "too_long",
            "window",
            "bucket_lengths",
            "documents",
        )


_log = logging.getLogger(__name__)
