"""Formulas and the table of chips, against the scaling book's answers and hand counts."""

import dataclasses

import pytest

from praxis_tools.plan.chips import CHIPS
from praxis_tools.plan.costs import FITTED
from praxis_tools.plan.search.formulas import (
    Layout,
    Shape,
    peak_bytes,
    step_seconds,
)

V5P = CHIPS["v5p"]


def test_when_a_v5p_is_bound_by_flops():
    # The scaling book's C / W, "Training": tokens per device from which FSDP is bound by flops.
    assert V5P.peak() / (2 * V5P.link_bandwidth) == pytest.approx(2550, rel=0.01)


LLAMA = Shape(
    parameters=7_000_000_000,
    num_layers=32,
    model_dims=4096,
    hidden_dims=11_008,
    vocab_size=32_000,
    slots=2,
    rows=256,
    tokens_per_row=2048,
)


def layout(**settings):
    return Layout(**{"replica": 1, "data": 256, "mdl": 1} | settings)


def test_the_bytes_of_fsdp_by_hand():
    weights, tokens = 7e9 / 256, 2048
    state = weights * 12 + weights * 2
    activations = 32 * tokens * 4096 * 2
    logits = tokens * 6 * 32_000
    block = tokens * 2 * (8 * 4096 + 4 * 11_008) + 2 * 2 * 7e9 / 32
    by_hand = state + activations + max(logits, block)
    assert peak_bytes(LLAMA, layout()) == pytest.approx(by_hand)


def test_what_makes_a_step_longer_or_larger():
    base = layout()
    kept = layout(policy="save_everything")
    assert step_seconds(LLAMA, kept, CHIPS["v5e"]) < step_seconds(LLAMA, base, CHIPS["v5e"])
    assert peak_bytes(LLAMA, kept) > 2 * peak_bytes(LLAMA, base)
    # Features split over 16 devices of a group of 16 rows send more than gathers of weights.
    split = layout(data=16, mdl=16, mdl_splits="features")
    assert step_seconds(LLAMA, split, CHIPS["v5e"]) > step_seconds(LLAMA, base, CHIPS["v5e"])
    # 512 devices have no row each: half of them compute filler.
    more = layout(data=512)
    assert step_seconds(LLAMA, more, CHIPS["v5e"]) > 0.9 * step_seconds(LLAMA, base, CHIPS["v5e"])


def test_long_rows_are_for_a_split_of_time():
    """Of 16 rows of 32,768 tokens 256 devices have no row each."""
    few = dataclasses.replace(LLAMA, rows=16, tokens_per_row=32_768)
    settings = {"data": 16, "mdl": 16}
    time, features = (layout(**settings, mdl_splits=how) for how in ("time", "features"))
    v5e = CHIPS["v5e"]
    assert peak_bytes(few, layout()) > 4 * peak_bytes(few, time)
    assert step_seconds(few, time, v5e) < step_seconds(few, features, v5e)
    # All devices have the whole of a matmul's features, and part of each weight.
    assert peak_bytes(few, time) > peak_bytes(few, features)


def test_what_a_split_of_time_sends_by_hand():
    """Beside weights, which move as under fsdp: queries, keys, values and outputs change places."""
    sent = 4 * 3 * 2048 * 4096 * 2 * 15 / 16 * 32  # Forward, backward, and forward again.
    v5e = CHIPS["v5e"]
    more = step_seconds(LLAMA, layout(data=16, mdl=16, mdl_splits="time"), v5e) - step_seconds(
        LLAMA, layout(), v5e
    )
    assert more == pytest.approx(sent / (2 * v5e.link_bandwidth * FITTED.link))


@pytest.mark.parametrize("name", CHIPS)
def test_a_chips_figures_go_together(name):
    chip = CHIPS[name]
    assert all(chip.sources)
    assert chip.peak("bf16") == chip.peak("an unknown type")
    if chip.clock:  # Matmul units of 128 x 128 or 256 x 256, two flops a cycle.
        units = [chip.peak() / chip.clock / (2 * size * size) for size in (128, 256)]
        assert min(abs(unit - round(unit)) / unit for unit in units) < 0.02, units
