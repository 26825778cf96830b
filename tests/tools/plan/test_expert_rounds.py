"""Predicted times of steps whose expert loads are uneven: additional rounds of all-to-alls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.core import MeshConfig, constrain, make_mesh
from praxis_tools.plan.chips import CHIPS
from praxis_tools.plan.plan_text import plan_text
from praxis_tools.plan.schedule.schedule import schedule
from praxis_tools.plan.topology import PhysicalMesh
from tests.layers.moe.test_sharded_experts import drawn, placed
from tests.layers.moe.test_uneven_loads import AXES, model_of
from tests.support.job_runs import launch
from tests.tools.plan.test_residuals import PLAN


@functools.cache
def text_of(expert_split):
    """Returns the program of the gradients of a layer on eight devices."""
    model = model_of((expert_split, None, None), ("expert",), {})
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 8, 1), axis_names=AXES))

    def loss(params, x):
        module = model.module({"params": placed(model, params, mesh), "non_trainable": {}})
        return jnp.sum(jnp.sin(module(constrain(x, ("expert",)))))

    with jax.set_mesh(mesh):
        params = drawn(model_of(None, None, {}))
        return jax.jit(jax.grad(loss)).lower(params, jnp.ones((8, 6, 7))).compile().as_text()


def planned(text):
    sizes = dict(zip(AXES, (1, 8, 1), strict=True))
    return schedule(text, CHIPS["cpu"], PhysicalMesh(sizes, np.zeros(8, int)))


@pytest.mark.slow
def test_each_round_after_the_first_takes_as_long_as_the_plan_predicts():
    text = text_of("expert")
    even, counted, loops = planned(text), [], 0
    for line in text.splitlines():
        if " while(" in line and "known_trip_count" not in line:
            line, loops = line + ', backend_config={"known_trip_count":{"n":"2"}}', loops + 1
        counted.append(line)
    assert loops == 2  # Of the forward pass and of the backward pass.
    assert 0 < even.expert_round_seconds < even.seconds
    three = planned("\n".join(counted))
    assert three.expert_round_seconds == 0
    assert three.seconds == pytest.approx(even.seconds + 2 * even.expert_round_seconds)


@pytest.mark.slow
def test_replicated_experts_have_no_rounds():
    assert planned(text_of(None)).expert_round_seconds == 0


@pytest.mark.parametrize(("load", "rounds"), [(1.0, 1), (1.25, 1), (1.3, 2), (2.5, 2), (8.0, 7)])
def test_number_of_rounds_for_a_load(load, rounds):
    plan = dataclasses.replace(PLAN, expert_round_seconds=0.5, expert_load=load)
    assert plan.num_expert_rounds == rounds
    assert plan.uneven_seconds == pytest.approx(3.0 + 0.5 * (rounds - 1))
    assert f"a load of {load:g} times the even load takes {rounds} round" in plan_text(plan)
    assert PLAN.uneven_seconds is None


def test_a_load_below_the_even_one_is_refused():
    done = launch("--mode=plan", "--exp=lm.Synthetic", "--topology=cpu:8", "--expert_load=0.9")
    assert done.code == 2 and "1 (even loads) or more" in " ".join(done.err.split()), done
