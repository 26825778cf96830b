"""The bytes that a TPU's compiler plans for what lies in the host's memory."""

import functools

import pytest

from tests.support import offload_runs
from tests.support.on_tpu import needs_libtpu, printed_by

# Three minutes of a compiler; where the arrays are: layers/stacking/test_host_weights.py.
pytestmark = [pytest.mark.nightly, needs_libtpu]
printed = functools.cache(printed_by)


def test_activations_and_slots_go_from_the_device_to_its_host():
    device, offload, _ = printed("tests.support.offload_runs").values()
    assert not any(size for name, size in device.items() if "host" in name)
    # Of 64 x 512 tokens over 4 devices, float32: inputs of 512, queries of 512 and a hidden layer
    # of 2048, these two split in 2.
    a_layer = 4 * 64 * 512 // 4 * (512 + 512 // 2 + 2048 // 2)
    assert offload["host_temp"] == offload_runs.NUM_LAYERS * a_layer
    # But for what is on its way: while a layer is computed with, the next is fetched.
    assert device["temp"] - offload["temp"] >= (offload_runs.NUM_LAYERS - 2) * a_layer
    slots = device["argument"] - offload["argument"]
    assert offload["host_argument"] == offload["host_output"] == offload["host_alias"] == slots
    # Two moments of each weight, all float32; what is left of the arguments is a batch of int32.
    assert 0 <= device["argument"] - 3 * slots // 2 < 2 * 4 * 64 * 512 // 4


def test_weights_come_from_the_host_a_layer_at_a_time():
    device, _, offloaded = printed("tests.support.offload_runs").values()
    dims, layers = offload_runs.LARGE, offload_runs.NUM_LAYERS
    # Four matrices of attention and two of the feed-forward layer, float32, over 8 devices.
    a_layer = 4 * (4 * dims["model_dims"] ** 2 + 2 * dims["model_dims"] * dims["hidden_dims"]) // 8
    weights = layers * a_layer
    assert device["argument"] - offloaded["argument"] == weights
    assert offloaded["host_argument"] == offloaded["host_output"] == weights
    # In either pass each layer's, but that the last one stays from pass to pass; their gradients
    # for the norm; both for the update. And the gradients, and the new weights.
    fetched, sent = 2 * weights - a_layer + weights + 2 * weights, 2 * weights
    # libtpu 0.0.50 moves one layer more, there and back.
    assert (offloaded["copy from the host"], offloaded["copy to the host"]) in (
        (fetched, sent),
        (fetched + a_layer, sent + a_layer),
    )
