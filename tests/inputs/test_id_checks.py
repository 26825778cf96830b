"""Ids that a model has no row for: found on the host, and named; what weighs nothing may stay."""

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.core.sharding.batch_sharding import check_ids

SIZES = {"ids": 257, "labels": 257}


def batch(**changes):
    """Returns a batch [7, 5] of the largest ids, with (row, token, value) put into leaves."""
    leaves = {
        "ids": np.full((7, 5), 256, np.int32),
        "labels": np.zeros((7, 5), np.int32),
        "weights": np.ones((7, 5), np.float32),
    }
    for name, (row, token, value) in changes.items():
        leaves[name][row, token] = value
    return leaves


def refusal(inputs, sizes=SIZES, first_row=0):
    with pytest.raises(ConfigError) as refused:
        check_ids(inputs, sizes, "datasets.train, batch 12", first_row=first_row)
    return str(refused.value)


@pytest.mark.parametrize("name", ["ids", "labels"])
@pytest.mark.parametrize("value", [257, 2**31 - 1, -1, -257])
def test_an_id_without_a_row_is_named_with_its_place(name, value):
    message = refusal(batch(**{name: (4, 3, value)}))
    assert f"datasets.train, batch 12: row 4 of {name} contains {value};" in message
    assert " 256," in message and "vocab_size (num_classes for a classifier) is 257" in message


def test_rows_are_those_of_the_global_batch():
    assert "row 30 of ids" in refusal(batch(ids=(4, 3, 300)), first_row=26)


def test_what_weighs_nothing_may_be_marked_by_any_label_and_by_negative_ids():
    for inputs in (
        batch(),
        batch(labels=(4, 3, -100), weights=(4, 3, 0.0)),
        batch(labels=(4, 3, 999), weights=(4, 3, 0.0)),
        batch(ids=(4, 3, -1), weights=(4, 3, 0.0)),
    ):
        check_ids(inputs, SIZES, "datasets.train, batch 12")
    # An embedding makes NaN of it, which attention spreads to other tokens.
    assert "contains 257" in refusal(batch(ids=(4, 3, 257), weights=(4, 3, 0.0)))


def test_a_weight_for_each_row_counts_for_all_of_it():
    inputs = {"labels": np.array([3, 10, -1]), "weights": np.array([1.0, 1.0, 0.0])}
    assert "row 1 of labels contains 10" in refusal(inputs, {"labels": 10})
    check_ids(inputs, {"labels": 11}, "datasets.train, batch 0")
    prompts = {"ids": np.array([[3, 4], [-1, -1]]), "weights": np.array([1.0, 0.0])}
    check_ids(prompts, SIZES, "decode_datasets.prompts, batch 0")
    assert "row 1 of ids contains -1" in refusal({"ids": prompts["ids"]})


def test_sources_beside_weighted_targets_are_held_to_their_largest_id():
    inputs = {**batch(), "src_ids": np.full((7, 9), -1)}
    check_ids(inputs, {**SIZES, "src_ids": 28}, "datasets.train, batch 12")
    inputs["src_ids"][2, 8] = 28
    assert "row 2 of src_ids contains 28" in refusal(inputs, {**SIZES, "src_ids": 28})


def test_a_batch_of_floats_and_an_absent_leaf_are_no_ids():
    check_ids({"ids": np.full((2, 3), 999.0)}, SIZES, "datasets.train, batch 0")
