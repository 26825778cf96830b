"""Rows of a batch out of pieces of documents, for every pipeline that packs."""

import abc
from typing import TYPE_CHECKING

import numpy as np

from praxis_lite.inputs.base import IndexedPipeline, lm_spec, spec_of
from praxis_lite.inputs.mixing.shuffle import examples_at
from praxis_lite.inputs.text.conversations import Tokens
from praxis_lite.inputs.text.packing import Packing

if TYPE_CHECKING:
    import jax


class PackedRows(IndexedPipeline):
    """Rows of documents: `ids`, `labels`, `weights`, `segment_ids`, `segment_pos`, of [B, T].

    `segment_ids` count the documents of a row from 1, and are 0 where there is none; attention
    stays within a segment. `segment_pos` counts from 0 in each. `weights` are 1 for labels that are
    to be learnt, and 0 for others.
    """

    seq_len: int
    seed: int
    shuffle: bool

    @property
    @abc.abstractmethod
    def table(self) -> Packing:
        """Which pieces of which documents each row has."""

    @abc.abstractmethod
    def document(self, number: int) -> Tokens:
        """Returns the tokens of a document; `is_answer` is None where all are to be learnt."""

    @property
    def num_batches(self) -> int | None:
        return None if self.shuffle else -(-self.table.num_rows // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        shape = (self.batch_size, self.seq_len)
        segments = spec_of(segment_ids=(shape, np.int32), segment_pos=(shape, np.int32))
        return {**lm_spec(*shape), **segments}

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first, count = index * self.batch_size + rows.start, rows.stop - rows.start
        chosen = examples_at(
            self.table.num_rows, first, count, seed=self.seed, shuffle=self.shuffle
        )
        names = ("ids", "labels", "segment_ids", "segment_pos")
        batch = {name: np.zeros((count, self.seq_len), np.int32) for name in names}
        batch["weights"] = np.zeros((count, self.seq_len), np.float32)
        positions = np.arange(self.seq_len, dtype=np.int32)
        for row, number in enumerate(chosen):
            begin, stop = self.table.starts[number : number + 2].tolist()
            ids, labels, segment_ids, segment_pos, weights = (
                batch[name][row] for name in (*names, "weights")
            )
            at = 0
            for segment, piece in enumerate(range(begin, stop), 1):
                label, size = int(self.table.firsts[piece]), int(self.table.counts[piece])
                tokens, is_answer = self.document(self.table.documents[piece])
                end = at + size
                ids[at:end] = tokens[label : label + size]
                labels[at:end] = tokens[label + 1 : label + size + 1]
                segment_ids[at:end] = segment
                segment_pos[at:end] = positions[:size]
                is_learnt = 1 if is_answer is None else is_answer[label + 1 : label + size + 1]
                weights[at:end] = is_learnt
                at = end
        return batch
