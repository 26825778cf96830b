"""Index arithmetic of windows, against counts made by hand, label by label."""

from collections import Counter

import numpy as np
import pytest

from praxis_lite.inputs.mixing.shuffle import shuffled
from praxis_lite.inputs.text.windows import EvaluationWindows, TrainingWindows, padding_position


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("num_labels", [3, 7, 8, 13, 37, 257])
def test_evaluation_counts_every_label_once(num_labels, stride):
    index = EvaluationWindows(num_labels, seq_len=7, stride=stride)
    positions, weights = index.windows(0, index.num_windows + 3)
    counted = Counter()
    for row_positions, row_weights in zip(positions, weights, strict=True):
        for label_position, weight in zip(row_positions[1:], row_weights, strict=True):
            if weight:
                counted[int(label_position)] += 1
    assert counted == {position: 1 for position in range(1, num_labels + 1)}
    assert set(np.unique(weights)) <= {0, 1}
    assert np.all(positions[index.num_windows :] == padding_position(num_labels))
    assert np.any(weights[index.num_windows - 1]), "the last window counts nothing: one too many"


def test_evaluation_windows_overlap_as_drawn_by_hand():
    positions, weights = EvaluationWindows(num_labels=8, seq_len=5, stride=2).windows(0, 3)
    none = 9
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5, 6, 7],
        [4, 5, 6, 7, 8, none],
    ]
    assert weights.tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]


def test_training_epoch_repeats_no_label_and_leaves_out_fewer_than_a_window():
    num_labels, seq_len = 257, 13
    index = TrainingWindows(num_labels, seq_len, seed=3)
    per_epoch = index.windows_per_epoch
    left_out = []
    for epoch in range(5):
        positions, weights = index.windows(epoch * per_epoch, per_epoch)
        assert np.all(weights == 1)
        assert np.all(np.diff(positions, axis=1) % num_labels == 1), "a window is not consecutive"
        labels = positions[:, 1:].ravel()
        assert len(set(labels)) == len(labels) == num_labels - num_labels % seq_len
        left_out.append(set(range(num_labels)) - set(labels.tolist()))
    assert len(set(map(frozenset, left_out))) == 5, "the grid is not redrawn"


def test_training_windows_do_not_depend_on_how_they_are_asked_for():
    index = TrainingWindows(num_labels=101, seq_len=13, seed=3)  # 7 windows an epoch
    whole, _ = index.windows(0, 37)
    one_by_one = np.concatenate([index.windows(number, 1)[0] for number in range(37)])
    np.testing.assert_array_equal(whole, one_by_one)


def test_shuffle_is_uniform_over_orders():
    """All 6 orders of 3 examples come equally often: 6,000 epochs, 5 standard deviations."""
    _, examples = shuffled(seed=7, size=3, first=0, count=3 * 6000)
    orders = Counter(map(tuple, examples.reshape(-1, 3).tolist()))
    assert len(orders) == 6
    assert max(abs(count - 1000) for count in orders.values()) < 5 * np.sqrt(1000 * 5 / 6)


def test_shuffled_order_never_changes():
    """A run that resumes after an upgrade of NumPy must meet the same order."""
    epochs, examples = shuffled(seed=2**63 + 1, size=7, first=5, count=11)
    assert epochs.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2]
    assert examples.tolist() == [5, 3, 0, 3, 5, 1, 6, 2, 4, 3, 0]
