"""Flax's guide to NNX on several devices: the same losses, specs and arrays, none made whole."""

import functools
import re

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import Learner, Partitioner, make_mesh
from praxis_lite.experiments import nnx_guide
from praxis_tools.explain import hlo
from tests.support.goldens import golden, trimmed
from tests.support.marks import slow_but

FILE = "reference/nnx_guide.json"
EXPERIMENTS = {"losses": nnx_guide.DotReluDot, "logical_losses": nnx_guide.LogicalDotReluDot}
UNEVEN = 61  # For what is the same of any size.
SPECS = {"dot1/kernel": [None, "model"], "w2": ["model"]}


@functools.cache
def run_of(experiment, depth=1024, mesh_shape=(2, 4), optimizer=optax.adam):
    """Returns a partitioner and a batch of an experiment."""
    config = experiment().config()
    config.mesh.ici_mesh_shape = mesh_shape
    config.task.model.depth = config.datasets["train"].arrays.depth = depth
    job = fdl.build(config)
    job.task.learner = Learner(optimizer, 1e-3)
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    return partitioner, partitioner.global_batch(job.datasets["train"].rows(0, slice(0, 8)))


def params_by_path(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


def trained(experiment, num_steps, **settings):
    partitioner, batch = run_of(experiment, **settings)
    state, losses = partitioner.init(partitioner.key(0)), []
    for _ in range(num_steps):
        state, outputs = partitioner.train_step(state, batch, partitioner.key(0))
        losses.append(float(outputs["metrics"]["loss"][0]))
    return partitioner, state, losses


@pytest.mark.parametrize("losses", slow_but({"logical_losses"}, EXPERIMENTS))
def test_the_losses_and_splits_are_those_of_the_guide(losses):
    expected = golden(FILE)
    partitioner, state, actual = trained(EXPERIMENTS[losses], 5)
    np.testing.assert_allclose(actual, expected[losses], atol=1e-5)
    params = params_by_path(state.mdl_vars["params"])
    name = "logical_specs" if losses == "logical_losses" else "sharded_specs"
    assert {path: trimmed(x.sharding.spec) for path, x in params.items()} == expected[name]
    slots = params_by_path(state.opt_states["slots"]["unstacked"])
    slots = {f"opt_state/{path}": trimmed(x.sharding.spec) for path, x in slots.items()}
    assert {path: slots[path] for path in expected["opt_state_specs"] if path != "step"} == slots


def test_the_guide_has_the_same_specs_however_it_makes_the_model():
    """With jit, eagerly, by logical names, abstractly and restored: and so has the layout here."""
    expected, leaves = golden(FILE), run_of(nnx_guide.DotReluDot)[0].layout.leaves()
    local = {leaf.path: trimmed(leaf.spec) for leaf in leaves if "params/" in leaf.path}
    assert {path.removeprefix("mdl_vars/params/"): spec for path, spec in local.items()} == SPECS
    for name in (
        "eager_on_specs",
        "eager_on_logical_ctx_specs",
        "get_abstract_model_specs",
        "logical_pspecs",
        "logical_specs",
        "sharded_specs",
    ):
        assert expected[name] == SPECS, name
    assert expected["restore"]["specs"] == SPECS
    other, _ = run_of(nnx_guide.DotReluDot, mesh_shape=(1, 8))
    w2 = jax.tree.leaves(other.layout.abstract(other.mesh).mdl_vars["params"]["w2"])[0]
    shard_shape = w2.sharding.shard_shape(w2.shape)
    assert list(shard_shape) == expected["restore_other_mesh"]["shard_shape_w2"]


@pytest.mark.slow
def test_one_device_has_the_losses_of_the_guide_too():
    _, _, actual = trained(nnx_guide.DotReluDot, 5, mesh_shape=(1, 1))
    np.testing.assert_allclose(actual, golden(FILE)["single_device_losses"], atol=1e-5)


def test_the_names_of_the_logical_model_are_reported_with_the_rules_that_they_took():
    partitioner, _ = run_of(nnx_guide.LogicalDotReluDot, UNEVEN)
    message = {leaf.path: leaf.declared_by for leaf in partitioner.layout.leaves()}
    assert "('embed', 'hidden'): hidden->model" in message["mdl_vars/params/dot1/kernel"]
    assert "('hidden', 'embed'): hidden->model" in message["mdl_vars/params/w2"]


@pytest.mark.parametrize("experiment", slow_but({nnx_guide.DotReluDot}, EXPERIMENTS.values()))
def test_no_device_makes_a_whole_weight(experiment):
    partitioner, _ = run_of(experiment, depth=UNEVEN)
    compiled = partitioner.init.lower(partitioner.key(0)).compile()
    shapes = {
        tuple(map(int, dims.split(",")))
        for dims in re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", compiled.as_text())
    }
    # Nothing in the program is larger than the split part, padding included, of a weight.
    part = UNEVEN * -(-UNEVEN // 4)
    assert max(np.prod(shape) for shape in shapes) == part
    memory = hlo.memory_per_device(compiled)
    # Two weights with two slots each, five scalars, and the table of all of them.
    assert 6 * 4 * part <= memory.outputs <= 6 * 4 * part + 5 * 4 + 11 * 8
    assert memory.temp < 4 * part


def test_the_sharded_weights_are_those_of_an_unsharded_init_bit_for_bit():
    partitioner, _ = run_of(nnx_guide.DotReluDot, depth=UNEVEN)
    layout = partitioner.layout.select("mdl_vars").select("params")
    state = partitioner.init(partitioner.key(0))
    actual = params_by_path(jax.jit(layout.unpad)(state.mdl_vars["params"]))

    def plain():
        with nnx.use_eager_sharding(False):
            model = nnx_guide.DotReluDotModel(UNEVEN, nnx.Rngs(0))
        return model.dot1.kernel[...], model.w2[...]

    # Compiled as init is: at another level LLVM rounds a product and a sum once or twice.
    kernel, w2 = jax.jit(plain, compiler_options={"xla_backend_optimization_level": 1})()
    np.testing.assert_array_equal(actual["dot1/kernel"], kernel)
    np.testing.assert_array_equal(actual["w2"], w2)


@pytest.mark.slow
def test_an_uneven_depth_learns_as_on_one_device():
    _, _, losses = trained(nnx_guide.DotReluDot, 5, depth=UNEVEN)
    _, _, alone = trained(nnx_guide.DotReluDot, 5, depth=UNEVEN, mesh_shape=(1, 1))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_a_checkpoint_is_restored_to_its_shards_on_another_mesh_too(tmp_path):
    partitioner, state, _ = trained(nnx_guide.DotReluDot, 2, depth=UNEVEN)
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        checkpoints.save(2, state, partitioner.layout, {})
    expected = jax.jit(partitioner.layout.unpad)(state)
    for mesh_shape in ((2, 4), (1, 8)):
        other, _ = run_of(nnx_guide.DotReluDot, UNEVEN, mesh_shape)
        with Checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(other.layout, other.mesh).state
        params = params_by_path(restored.mdl_vars["params"])
        assert {path: trimmed(x.sharding.spec) for path, x in params.items()} == SPECS
        part = -(-UNEVEN // mesh_shape[1])
        assert params["w2"].addressable_shards[0].data.shape == (part, UNEVEN)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(other.layout.unpad)(restored), expected)


def matrices_in(text):
    return sorted(re.findall(r"f32\[[0-9,]+\]", text))


def test_a_step_of_sgd_has_the_all_reduces_of_the_guide():
    expected = [matrices_in(shapes) for _, shapes in golden(FILE)["sgd_step_collective_lines"]]
    partitioner, batch = run_of(nnx_guide.DotReluDot, optimizer=optax.sgd)
    state = partitioner.layout.abstract(partitioner.mesh)
    compiled = partitioner.train_step.lower(state, batch, partitioner.key(0)).compile()
    lines = [line.split(" all-reduce(") for line in compiled.as_text().splitlines()]
    actual = [matrices_in(before) for before, *after in lines if after]
    # Besides there are scalars: the loss, its weight, and the norm of the gradient.
    assert sorted(filter(None, actual)) == sorted(expected)
    # What else there is moves rows of the batch, which comes split over all devices.
    others = [item for item in hlo.collectives(compiled) if item.kind != "all-reduce"]
    assert sum(other.bytes for other in others) <= 3 * 4 * 1024 * 4
