"""Steps as objects: traced for shapes, run without compiling again."""

import jax
import numpy as np
import pytest

from praxis_lite.core import Partitioner
from tests.support.lm_runs import batches, partitioner_of, structs


@pytest.fixture(scope="module")
def partitioner():
    shared = partitioner_of("uneven", "adamw", (1, 4, 2))
    return Partitioner(shared.task, shared.mesh)  # Which has called none of its steps.


def test_a_step_is_compiled_once_for_shapes_and_for_a_call(partitioner):
    batch, key = batches("uneven")[0], partitioner.key(0)
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
    assert is_true.shape == (len(batch["ids"]),)
    for number in (1, 2):
        state, _ = partitioner.train_step(state, inputs, key)
        assert partitioner.train_step.num_compiled() == 1
        assert int(state.step) == number
    assert partitioner.eval_step.num_compiled() == partitioner.eval_examples.num_compiled() == 1


def test_the_steps_by_their_kinds(partitioner):
    assert {kind: (step.name, step.trains) for kind, step in partitioner.steps.items()} == {
        "train": ("train_step", True), "eval": ("eval_step", False),
        "eval_examples": ("eval_examples", False), "decode": ("decode_step", False),
    }
    assert all(getattr(partitioner, step.name) is step for step in partitioner.steps.values())
