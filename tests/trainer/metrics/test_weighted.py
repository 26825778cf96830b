"""The weighted mean against NumPy, and what a weight of zero means."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.trainer.evaluation import WeightedMean


def test_mean_over_unequal_batches_is_the_mean_over_all_their_tokens():
    rng = np.random.default_rng(7)
    batches = [rng.normal(5.0, 2.0, size).astype(np.float32) for size in (13, 1, 37, 7)]
    mean = WeightedMean()
    for batch in batches:
        mean.add({"loss": (np.float64(batch.mean(dtype=np.float64)), np.float32(batch.size))})
    want = np.concatenate(batches).mean(dtype=np.float64)
    assert mean.result()["loss"] == pytest.approx(want, rel=1e-14)


def test_sums_are_kept_in_float64():
    # In float32 2**24 + 1 == 2**24: the second value would be lost.
    mean = WeightedMean()
    mean.add({"loss": (np.float32(2**24), np.float32(1))})
    mean.add({"loss": (np.float32(1), np.float32(1))})
    assert mean.result()["loss"] == (2**24 + 1) / 2


def test_metrics_of_different_weights_do_not_mix():
    mean = WeightedMean()
    mean.add({"loss": (2.0, 3.0), "accuracy": (0.5, 1.0)})
    mean.add({"loss": (4.0, 1.0)})
    assert mean.result() == {"loss": 2.5, "accuracy": 0.5}


@pytest.mark.parametrize("filler", [0.0, math.nan, math.inf])
def test_a_pair_of_weight_zero_counts_for_nothing(filler):
    mean = WeightedMean()
    mean.add({"loss": (filler, 0.0)})
    assert mean.result() == {}
    mean.add({"loss": (3.0, 7.0)})
    mean.add({"loss": (filler, 0.0)})
    assert mean.result() == {"loss": 3.0}


def test_a_nan_that_carries_weight_is_not_hidden():
    mean = WeightedMean()
    mean.add({"loss": (math.nan, 1.0)})
    assert math.isnan(mean.result()["loss"])


def test_jax_scalars_are_taken():
    mean = WeightedMean()
    mean.add({"loss": (jnp.asarray(1.5, jnp.bfloat16), jnp.asarray(3))})
    assert mean.result() == {"loss": 1.5}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_counts_nothing_is_refused(weight):
    with pytest.raises(ValueError, match="'loss'"):
        WeightedMean().add({"loss": (1.0, weight)})
