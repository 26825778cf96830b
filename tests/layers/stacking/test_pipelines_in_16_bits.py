"""Pipelines whose blocks compute in bfloat16, within the rounding that a check allows a mesh."""

import jax.numpy as jnp
import pytest

from praxis_tools.check import check_on_meshes
from tests.support.marks import nightly_but
from tests.tools.check.defects import by_pipeline


class Split(by_pipeline.Split):
    """The backward pass in two parts."""

    def task(self):
        task = super().task()
        task.model.fprop_dtype = jnp.bfloat16
        return task


class OneForward(by_pipeline.OneForward):
    """1F1B, its backward pass in two parts."""

    def task(self):
        task = super().task()
        task.model.fprop_dtype = jnp.bfloat16
        return task


@pytest.mark.slow
@pytest.mark.parametrize("experiment", nightly_but({Split}, [Split, OneForward]))
def test_a_step_in_bfloat16_is_that_of_one_device(experiment):
    actual = check_on_meshes(experiment, [by_pipeline.MESH], steps=1, parts=("as trained",))
    # Rounding turns a guess of one token that is hardly one: no number of accuracy is between.
    compared = [item for item in actual.comparisons if "accuracy" not in item.leaf]
    assert {item.kind for item in compared} == {
        "loss as trained",
        "metrics as trained",
        "gradients as trained",
    }
    assert all(item.is_equal for item in compared), actual.table()
