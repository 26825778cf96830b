"""The bytes that a TPU's program of microbatches sums over devices: those of one batch."""

import pytest

from tests.support.on_tpu import needs_libtpu, printed_by


@pytest.mark.nightly
@needs_libtpu
def test_gradients_are_summed_over_devices_once_a_step():
    whole, microbatches = printed_by("tests.support.accumulation_runs")
    assert whole.keys() == microbatches.keys() == {"all-reduce"}
    # Of each weight a gradient: two tables, and of three layers 4 projections and 2 of the MLP.
    weights = 2 * 256 * 128 + 3 * (4 * 128 * 128 + 2 * 128 * 512)
    assert 4 * weights <= whole["all-reduce"] <= 1.01 * 4 * weights
    # But for scalars: the sum of the weights of each microbatch's tokens.
    assert 0 <= microbatches["all-reduce"] - whole["all-reduce"] <= 4 * 4 * 4
