"""Computes which positions of a token stream each window contains.

A stream is `EOS doc EOS doc ... EOS`. It has `num_labels + 1` tokens; all tokens except the first
are labels. Both classes have a `windows(first, count)` method, which returns, for windows first to
first + count - 1:

* positions int64[count, seq_len + 1]: the index of each token, or `padding_position` for padding;
* weights float32[count, seq_len]: the weight of each label, that is, of each token except the
  first.
"""

import dataclasses

import numpy as np

from praxis_lite.inputs.mixing.shuffle import random_bits, shuffled


def padding_position(num_labels: int) -> int:
    """Returns the position after the last token, where pipelines append a zero for padding."""
    return num_labels + 1


@dataclasses.dataclass(frozen=True)
class TrainingWindows:
    """Endless windows in a random order; within an epoch, no label occurs twice.

    The windows in an epoch start at a random offset and wrap around at the end of the stream, which
    starts and ends with EOS. In each epoch, fewer than seq_len labels are omitted; which labels are
    omitted differs between epochs.
    """

    num_labels: int
    seq_len: int
    seed: int

    @property
    def windows_per_epoch(self) -> int:
        return self.num_labels // self.seq_len

    def windows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        epochs, indices = shuffled(self.seed, self.windows_per_epoch, first, count)
        offset_of_epoch = {epoch: self._offset(epoch) for epoch in set(epochs.tolist())}
        offsets = np.array([offset_of_epoch[epoch] for epoch in epochs.tolist()], np.int64)
        starts = offsets + indices * self.seq_len
        # The stream starts and ends with EOS, so the positions num_labels and 0 have the same
        # token.
        positions = (starts[:, None] + np.arange(self.seq_len + 1)) % self.num_labels
        return positions, np.ones((count, self.seq_len), np.float32)

    def _offset(self, epoch: int) -> int:
        return int(random_bits(self.seed, epoch, 1, purpose=1)[0] % np.uint64(self.num_labels))


@dataclasses.dataclass(frozen=True)
class EvaluationWindows:
    """Windows for one pass in order, in which every label has weight 1 in exactly one window.

    Window k starts at token k * stride. All labels of the first window have weight 1. In later
    windows, only the last `stride` labels have weight 1, and the labels before them are context.
    """

    num_labels: int
    seq_len: int
    stride: int

    @property
    def num_windows(self) -> int:
        beyond_first = max(0, self.num_labels - self.seq_len)
        return 1 + -(-beyond_first // self.stride)

    def windows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        indices = np.arange(first, first + count, dtype=np.int64)[:, None]
        positions = indices * self.stride + np.arange(self.seq_len + 1)
        # Positions after the stream, and all positions of windows after the last, are padding.
        exists = (indices < self.num_windows) & (positions <= self.num_labels)
        is_new = (indices == 0) | (np.arange(self.seq_len) >= self.seq_len - self.stride)
        weights = (exists[:, 1:] & is_new).astype(np.float32)
        return np.where(exists, positions, padding_position(self.num_labels)), weights
