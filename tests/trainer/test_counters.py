"""Counts of steps do not wrap: up to 2**31 - 1 they are right, and beyond it a job is refused."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError, RunConfig
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.config.text import load_config_file
from praxis_lite.core import Learner, Partitioner, TrainState, WeightSpec, make_mesh
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job.job_dir import JobDir
from praxis_lite.optimizers.schedules import delayed_cosine, linear, polynomial
from tests.support.job_runs import launch, lines_of, succeed
from tests.support.line_jobs import LINE

LAST = 2**31 - 1


def test_more_steps_than_the_state_counts_are_refused():
    assert RunConfig(num_train_steps=LAST).num_train_steps == LAST
    with pytest.raises(ConfigError, match="1.*2147483647"):
        RunConfig(num_train_steps=LAST + 1)


@pytest.mark.slow
def test_the_last_steps_that_can_be_counted_are_made_right_and_no_more(tmp_path):
    job = JobDir(tmp_path)
    argv = (LINE, f"--job_log_dir={tmp_path}", "--set")
    succeed(*argv, "run.num_train_steps=1")
    built = fdl.build(load_config_file(job.config_json, packages=("jobzoo",)).config)
    partitioner, train = Partitioner(built.task, make_mesh(built.mesh)), built.datasets["train"]
    with Checkpoints(job.checkpoints, saving=SaveSettings()) as saved:
        state = saved.restore(partitioner.layout, partitioner.mesh).state
        weights = jax.device_get(state.mdl_vars["params"]["w"])
        count = jax.device_put(np.int32(LAST - 2), partitioner.replicated)
        opt_states = {**state.opt_states, "num_updates": count}
        state = TrainState(count, state.mdl_vars, opt_states)
        data = DataPosition.of_step(LAST - 2, (7,)).as_json(train)
        saved.save(LAST - 2, state, partitioner.layout, data, is_last=True)

    settings = (f"run.num_train_steps={LAST}", "run.debug_nans=true")
    done = succeed(*argv, *settings)
    assert f"trained to step {LAST}" in done.out
    lines = lines_of(job.metrics_jsonl)[-2:]
    assert [line["step"] for line in lines] == [LAST - 1, LAST]
    # One batch is left out, so that its index is one more than the steps made.
    rows = train.rows(LAST - 1, slice(0, 13))
    loss = np.mean(np.square(rows["inputs"] @ weights - rows["labels"]))
    assert lines[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    with Checkpoints(job.checkpoints) as saved:
        restored = saved.restore(partitioner.layout, partitioner.mesh)
    assert restored.step == int(restored.state.step) == LAST
    assert int(restored.state.opt_states["num_updates"]) == LAST
    assert restored.data["next_batch"] == LAST + 1 and restored.data["skipped"] == [7]

    assert "has already made its 2147483647 steps" in succeed(*argv, *settings).out
    refused = launch(*argv, f"run.num_train_steps={LAST + 1}")
    assert refused.code == 2 and "2147483647" in " ".join(refused.err.split())


@pytest.mark.parametrize("first", [1000, 2**24 + 1, LAST - 8])
def test_schedules_tell_steps_apart_however_many_were_made(first):
    start, limit = (first, 2.0), (first + 4, 1.0)
    for schedule, shape in (
        (linear(start=start, limit=limit), lambda r: 2 - r),
        (polynomial(start=start, limit=limit, power=2), lambda r: 2 - r**2),
        (delayed_cosine(start=start, limit=limit), lambda r: 1.5 + 0.5 * np.cos(np.pi * r)),
    ):
        counts = [first - 1, first, first + 1, first + 3, first + 4, first + 5]
        rates = [float(jax.jit(schedule)(jnp.int32(count))) for count in counts]
        assert rates == pytest.approx([shape(r) for r in (0, 0, 0.25, 0.75, 1, 1)], abs=1e-6)


def test_the_keys_of_the_last_steps_differ():
    keys = [
        jax.random.key_data(jax.random.fold_in(jax.random.key(0), jnp.int32(step))).tolist()
        for step in (0, 1, LAST - 2, LAST - 1, LAST)
    ]
    assert len({tuple(key) for key in keys}) == 5


def test_a_rate_that_is_not_finite_changes_no_weight():
    rates = jnp.array([0.5, np.nan, np.inf])
    params = {"w": jnp.ones(3)}
    specs = {"w": WeightSpec((3,), jnp.float32)}
    learner = Learner(optax.adam, lambda count: rates[count])
    bound = learner.bind(specs)
    state = bound.init(params)
    for step in range(3):
        before = params, state["slots"]
        params, state, scalars, is_skipped = bound.update(
            {"w": jnp.full(3, 0.1)}, state, params, jnp.zeros(())
        )
        after = params, state["slots"]
        is_same = jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, after))
        assert is_same == (step > 0)
        assert int(scalars["num_skipped_steps"]) == step
        assert bool(is_skipped) == (step > 0)
