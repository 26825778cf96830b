"""The bytes that a TPU's program of micro-batches sums over devices: those of one batch."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from praxis_lite.core.partitioner import compiler_options
from praxis_lite.core.sharding.devices.axis_types import mesh_of
from tests.support.on_tpu import needs_libtpu, printed_by


@pytest.mark.slow
@needs_libtpu
def test_gradients_are_summed_over_devices_once_a_step():
    whole, micro_batches = printed_by("tests.support.accumulation_runs")
    assert whole.keys() == micro_batches.keys() == {"all-reduce"}
    # Of each weight a gradient: two tables, and of three layers 4 projections and 2 of the MLP.
    weights = 2 * 256 * 128 + 3 * (4 * 128 * 128 + 2 * 128 * 512)
    assert 4 * weights <= whole["all-reduce"] <= 1.01 * 4 * weights
    # But for scalars: the sum of the weights of each micro-batch's tokens.
    assert 0 <= micro_batches["all-reduce"] - whole["all-reduce"] <= 4 * 4 * 4


def test_an_option_of_the_users_own_is_kept_and_other_platforms_have_none(monkeypatch):
    mesh, ours = mesh_of(np.asarray(jax.devices()), ("data",)), compiler_options.ACCUMULATING
    assert compiler_options.more_options(ours, None, mesh) is None
    monkeypatch.setattr(
        compiler_options, "step_options",
        lambda options, mesh: {name.removesuffix("?"): x for name, x in options["tpu"].items()},
    )
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
    ((name, value),) = compiler_options.more_options(ours, None, mesh).items()
    assert compiler_options.more_options(ours, {name: 0}, mesh) == {name: 0} != {name: value}
    assert compiler_options.more_options(ours, {"other": 1}, mesh) == {name: value, "other": 1}
