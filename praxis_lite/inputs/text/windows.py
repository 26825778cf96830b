"""Positions of windows in a token stream: index arithmetic, without text.

A stream is `EOS doc EOS doc ... EOS`: `num_labels + 1` tokens, of which all but the first are
labels. Both kinds of windows return, for `count` windows from number `first` on,
    positions int64[count, seq_len + 1]: of the tokens; `padding_position` for padding,
    weights float32[count, seq_len]: of the labels, which are all tokens but the first.
"""

import dataclasses

import numpy as np

from praxis_lite.inputs.mixing.shuffle import random_bits, shuffled


def padding_position(num_labels: int) -> int:
    """Returns the position after the stream, where a pipeline appends a zero."""
    return num_labels + 1


@dataclasses.dataclass(frozen=True)
class TrainingWindows:
    """Endless windows that repeat no label within an epoch; grid and order change every epoch.

    The stream starts and ends with EOS, so windows wrap around after num_labels tokens: the grid
    may start anywhere, and each epoch leaves out different labels (fewer than seq_len).
    """

    num_labels: int
    seq_len: int
    seed: int

    @property
    def windows_per_epoch(self) -> int:
        return self.num_labels // self.seq_len

    def windows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        epochs, places = shuffled(self.seed, self.windows_per_epoch, first, count)
        offset_of_epoch = {epoch: self._offset(epoch) for epoch in set(epochs.tolist())}
        offsets = np.array([offset_of_epoch[epoch] for epoch in epochs.tolist()], np.int64)
        starts = offsets + places * self.seq_len
        positions = (starts[:, None] + np.arange(self.seq_len + 1)) % self.num_labels
        return positions, np.ones((count, self.seq_len), np.float32)

    def _offset(self, epoch: int) -> int:
        return int(random_bits(self.seed, epoch, 1, purpose=1)[0] % np.uint64(self.num_labels))


@dataclasses.dataclass(frozen=True)
class EvaluationWindows:
    """One pass in order, in which every label has weight 1 in exactly one window.

    Window k starts at token k * stride. All labels of the first window count, and the last `stride`
    labels of each later one; the labels before are context.
    """

    num_labels: int
    seq_len: int
    stride: int

    @property
    def num_windows(self) -> int:
        beyond_first = max(0, self.num_labels - self.seq_len)
        return 1 + -(-beyond_first // self.stride)

    def windows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.arange(first, first + count, dtype=np.int64)[:, None]
        positions = numbers * self.stride + np.arange(self.seq_len + 1)
        there = (numbers < self.num_windows) & (positions <= self.num_labels)
        is_new = (numbers == 0) | (np.arange(self.seq_len) >= self.seq_len - self.stride)
        weights = (there[:, 1:] & is_new).astype(np.float32)
        return np.where(there, positions, padding_position(self.num_labels)), weights
