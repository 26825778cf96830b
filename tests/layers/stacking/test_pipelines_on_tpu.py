"""The collectives of pipelines' steps in programs for a TPU, counted by hand."""

import collections
import functools

import pytest

from tests.support import pipeline_runs
from tests.support.on_tpu import needs_libtpu, printed_by
from tests.support.pipeline_runs import DATA, DIMS, HIDDEN, LAYERS, LENGTH, ROWS, STAGES, VOCABULARY

pytestmark = [pytest.mark.nightly, needs_libtpu]
programs = functools.cache(lambda: printed_by(pipeline_runs.__name__))

# Four projections, two of the MLP with biases, and the scales of two norms.
LAYER = 4 * DIMS * DIMS + 2 * DIMS * HIDDEN + HIDDEN + DIMS + 2 * DIMS
STAGE, TABLE, NORM = (4 * n for n in (LAYERS // STAGES * LAYER, VOCABULARY * DIMS, DIMS))
# How often a step sums each: after a loop over ticks, and in the ticks before and behind it that
# are no loop. The last has only backward passes, so no loss.
SUMS = {
    "1f1b": {"stage": 2, "softmax": 1, "embedding": 2},
    "split": {"stage": 2, "softmax": 2, "embedding": 2},
}


def summed(program, num_devices):
    """Returns the bytes that so many devices sum at a time in a step, but for scalars."""
    return sum(
        size * count
        for kind, size, count, group in program
        if kind == "all-reduce" and group == num_devices and size > 64
    )


@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_summed_over_devices_as_often_whatever_the_microbatches(name):
    times = SUMS[name]
    for program in programs()[name]:
        assert summed(program, DATA) == times["stage"] * STAGE
        # Tables lie whole on all devices, the last norm too.
        expected = (times["softmax"] + times["embedding"]) * TABLE + times["softmax"] * NORM
        assert summed(program, STAGES * DATA) == expected


def test_a_split_backward_pass_sums_gradients_of_layers_once():
    (program,) = programs()["gpipe, split"]
    assert summed(program, DATA) == STAGE


@pytest.mark.parametrize("name", SUMS)
def test_a_tick_hands_on_x_and_its_gradient_once(name):
    x = ROWS // DATA * LENGTH * DIMS * 4
    for program in programs()[name]:
        in_loops = collections.Counter(
            (kind, size) for kind, size, count, _ in program if count > 1 and size > 64
        )
        # Rows of embedding and softmax are split over stages, too: x and its gradient go there and
        # back, half a microbatch each way.
        assert in_loops == {
            ("collective-permute", x): 2 + 2,
            ("collective-permute", x // 2): 2,
            ("all-to-all", x): 2,
            ("all-gather", x): 2,
        }
