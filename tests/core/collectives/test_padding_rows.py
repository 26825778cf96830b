"""A batch filled up: its rows, then copies of the first that have no weight."""

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.core.collectives.padding_rows import num_missing_rows, with_padding_rows

BATCH = {
    "ids": np.arange(10, dtype=np.int32).reshape(5, 2),
    "parts": {"x": np.full(5, 0.5, np.float32)},
    "scale": np.float32(3.0),
    "weights": np.ones((5, 2), np.float32),
}


def test_rows_behind_a_batch_are_copies_of_its_first_without_weight():
    assert num_missing_rows(BATCH, 4, "4 devices") == 3
    actual = with_padding_rows(BATCH, 3)
    assert actual["ids"].tolist() == [*BATCH["ids"].tolist(), *[[0, 1]] * 3]
    assert actual["parts"]["x"].tolist() == [0.5] * 8
    assert actual["scale"] == 3.0
    assert actual["weights"].tolist() == [[1, 1]] * 5 + [[0, 0]] * 3


def test_a_batch_that_divides_is_left_as_it_is():
    assert num_missing_rows(BATCH, 5, "5 devices") == 0
    assert with_padding_rows(BATCH, 0) is BATCH


def test_a_batch_that_cannot_say_which_rows_count_is_an_error():
    given = {name: x for name, x in BATCH.items() if name != "weights"}
    with pytest.raises(ConfigError, match="5 rows.*4 devices.*weights.*'ids'.*multiple of 4"):
        num_missing_rows(given, 4, "4 devices")
