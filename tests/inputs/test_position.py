"""The position in the training data, against a list of batches from which some are left out."""

import itertools

import numpy as np
import pytest

from praxis_lite.inputs import InMemory
from praxis_lite.inputs.position import DataPosition, step_of

PIPELINE = InMemory({"x": np.arange(101)}, 3, shuffle=True)


@pytest.mark.parametrize("skipped", [(), (0,), (5,), (9, 2, 3), (0, 1, 2), (4, 5, 7)])
def test_the_batches_are_all_but_those_left_out_from_any_step_on(skipped):
    indices = [index for index in range(29) if index not in skipped]
    wanted = list(itertools.islice(PIPELINE.batches(), 29))
    for step in range(17):
        position = DataPosition.of_step(step, skipped)
        got = itertools.islice(position.batches(PIPELINE, slice(0, 3)), 7)
        for (index, batch), expected in zip(got, indices[step:], strict=False):
            assert index == expected
            np.testing.assert_array_equal(batch["x"], wanted[index]["x"])
        # What a checkpoint keeps gives the step back, and the order of `skipped` is no matter.
        kept = position.as_json(PIPELINE)
        assert step_of(kept) == step and kept["next_batch"] == indices[step]
        assert DataPosition.of_step(step, tuple(reversed(skipped))) == position


def test_each_process_gets_its_rows():
    position = DataPosition.of_step(3, (1,))
    _, whole = next(position.batches(PIPELINE, slice(0, 3)))
    rows = [next(position.batches(PIPELINE, slice(*pair)))[1]["x"] for pair in ((0, 2), (2, 3))]
    np.testing.assert_array_equal(np.concatenate(rows), whole["x"])


def test_a_batch_named_twice_is_left_out_once():
    for step in range(9):
        position = DataPosition.of_step(step, (4, 1, 4, 1))
        assert position == DataPosition.of_step(step, (1, 4))
        assert position.skipped == (1, 4)


def test_indices_do_not_wrap():
    step = 2**31 - 3
    data = DataPosition.of_step(step, (5, step + 1)).as_json(PIPELINE)
    assert data["next_batch"] == step + 2 and step_of(data) == step
    assert DataPosition.of_step(2**40, (2**40,)).next_batch == 2**40 + 1
