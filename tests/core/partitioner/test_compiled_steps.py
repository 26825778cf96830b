"""Steps as objects: traced for shapes, run without compiling again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask
from tests.support.lm_runs import structs

ROWS, DIMS = 11, 7


def squared_errors(params, inputs, key):
    return jnp.square(inputs["x"] @ params["w"] - inputs["y"])


@pytest.fixture(scope="module")
def partitioner():
    model = FunctionModel(lambda key: {"w": jax.random.normal(key, (DIMS,))}, specs={"w": P("mdl")})
    task = LossTask(
        model,
        squared_errors,
        Learner(optax.adamw, 0.1),
        inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
    )
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2))))


def test_a_step_is_compiled_once_for_shapes_and_for_a_call(partitioner):
    rng, key = np.random.default_rng(3), partitioner.key(0)
    batch = {"x": rng.normal(size=(ROWS, DIMS)), "y": rng.normal(size=ROWS)}
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    state = partitioner.init(key)
    inputs = partitioner.global_batch(batch)
    of_shapes = partitioner.train_step.lower(structs(batch))
    assert of_shapes.as_text() == partitioner.train_step.lower(state, inputs, key).as_text()
    of_shapes.compile()
    before = state.mdl_vars
    by_position = partitioner.eval_step(before, inputs, None)
    by_name = partitioner.eval_step(mdl_vars=before, batch=inputs)
    metrics, _, is_true = partitioner.eval_examples(before, inputs)
    jax.tree.map(np.testing.assert_array_equal, by_name, by_position)
    jax.tree.map(np.testing.assert_allclose, metrics, by_position)
    assert is_true.shape == (ROWS,)
    for number in (1, 2):
        state, _ = partitioner.train_step(state, inputs, key)
        assert partitioner.train_step.num_compiled() == 1
        assert int(state.step) == number
    assert partitioner.eval_step.num_compiled() == partitioner.eval_examples.num_compiled() == 1


def test_the_steps_by_their_kinds(partitioner):
    assert {kind: (step.name, step.trains) for kind, step in partitioner.steps.items()} == {
        "train": ("train_step", True),
        "eval": ("eval_step", False),
        "eval_examples": ("eval_examples", False),
        "decode": ("decode_step", False),
    }
    assert all(getattr(partitioner, step.name) is step for step in partitioner.steps.values())
