"""An Orbax checkpoint of `nnx.state`, as Flax's guide saves it: a model's weights, on any mesh."""

import functools
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from praxis_lite import CheckpointLoadingRules, ConfigError, RunConfig
from praxis_lite.checkpoints.init.loading_rules import LOAD_ALL
from praxis_lite.checkpoints.init.planning import plan_init
from praxis_lite.checkpoints.nnx import mdl_vars_from_nnx
from praxis_lite.core import Learner, NnxModel, Partitioner, infer_sharding
from praxis_lite.experiments.nnx_guide import DotReluDotModel
from praxis_lite.tasks.loss import LossTask
from tests.checkpoints.test_init_from_checkpoint import init

LOAD = {"load_rules": [LOAD_ALL]}


class Net(nnx.Module):
    """All kinds of variables that a state has, of sizes that no mesh divides."""

    def __init__(self, hidden=13, dtype=jnp.float32, *, rngs):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "mdl"))
        self.up = nnx.Linear(7, hidden, kernel_init=split, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.layers = nnx.List(
            [nnx.Linear(hidden, hidden, param_dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.scale = nnx.Param(rngs.params.normal((hidden,)))

    def __call__(self, x):
        x = self.dropout(self.norm(self.up(x)))
        for layer in self.layers:
            x = layer(x)
        return x * self.scale[...][None]


def squared(model, inputs, key):
    return jnp.mean(model(inputs["x"]) ** 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model that has seen a batch, and the folders into which Flax's users save it."""
    with nnx.use_eager_sharding(False):
        model = Net(rngs=nnx.Rngs(3))
    model(np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32))  # Moves the statistics.
    model.eval()
    state, folder = nnx.state(model), tmp_path_factory.mktemp("nnx")
    # A layer's uneven weight cannot be split by JAX, so each array is whole on one device.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.save(folder / "pure", nnx.to_pure_dict(state))
        checkpointer.save(folder / "weights", nnx.state(model, nnx.Param))
    return model, folder


def partitioner(mesh, **settings):
    task = LossTask(functools.partial(Net, **settings), squared, Learner(optax.adam, 1e-3))
    return Partitioner(task, mesh)


def wanted_of(model):
    kinds = {"params": nnx.Param, "non_trainable": nnx.BatchStat}
    actual = {}
    for name, kind in kinds.items():
        for path, x in nnx.to_flat_state(nnx.state(model, kind)):
            actual[f"mdl_vars/{name}/{'/'.join(map(str, path))}"] = np.asarray(x[...])
    return actual


@pytest.mark.parametrize(
    ("form", "shape"),
    [("pure", (1, 4, 2)), pytest.param("state", (1, 1, 1), marks=pytest.mark.slow)],
)
def test_a_job_begins_with_the_weights_on_any_mesh(saved, form, shape, mesh_of):
    model, folder = saved
    rules = {str(folder / form): CheckpointLoadingRules(**LOAD)}
    assert RunConfig(num_train_steps=1, init_from_checkpoint_rules=rules)
    actual, plan = init(rules, partitioner(mesh_of(*shape)))
    expected = wanted_of(model)
    assert len(expected) == 11
    for path, x in expected.items():
        np.testing.assert_array_equal(actual[path], x, err_msg=path)
    assert not any(x.any() for path, x in actual.items() if path.startswith("opt_states/slots"))
    assert "mdl_vars: 11 from " in plan.summary()[0] and "step: 0" in plan.summary()


def test_a_model_in_hand_has_the_weights_and_gives_the_same_outputs(saved):
    model, folder = saved
    ours = NnxModel(Net)
    x = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    for form in ("state", "pure"):
        module = ours.module(mdl_vars_from_nnx(ours, folder / form))
        np.testing.assert_array_equal(module(x), model(x))


def test_a_part_of_a_state_gives_what_it_has(saved, mesh_of):
    model, folder = saved
    target = partitioner(mesh_of(1, 1, 1))
    with pytest.raises(ConfigError, match="norm/mean"):
        plan_init(target.layout, {str(folder / "weights"): CheckpointLoadingRules(**LOAD)})
    rules = CheckpointLoadingRules(load_rules=[(r"params/(.*)", "params/{}")])
    plan = plan_init(target.layout, {str(folder / "weights"): rules})
    assert plan.sources.keys() == {p for p in wanted_of(model) if p.startswith("mdl_vars/params")}
    with pytest.raises(ConfigError, match="norm/mean"):
        mdl_vars_from_nnx(NnxModel(Net), folder / "weights")


def test_arrays_that_were_saved_in_shards_are_whole(tmp_path, mesh_of):
    with nnx.use_eager_sharding(False):
        state = nnx.state(DotReluDotModel(16, nnx.Rngs(0)))
    mesh = mesh_of(1, 2, 4)
    sharded = jax.device_put(state, infer_sharding(state, [(".*", 'shard_dim("mdl", 1)')], mesh))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", sharded)
    actual = mdl_vars_from_nnx(NnxModel(functools.partial(DotReluDotModel, 16)), tmp_path / "state")
    jax.tree.map(np.testing.assert_array_equal, actual["params"], nnx.to_pure_dict(state))


class Larger(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.shift = nnx.Param(jnp.zeros(13))


class Smaller(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        del self.scale


def narrow(rngs):
    return Net(11, rngs=rngs)


def half(rngs):
    return Net(dtype=jnp.bfloat16, rngs=rngs)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Larger, ": shift "),
        (Smaller, ": scale "),
        (narrow, r"layers/0/kernel.*float32\[13, 13\].*float32\[11, 11\]"),
        (half, r"layers/0/bias.*float32\[13\].*bfloat16\[13\]"),
    ],
)
def test_another_model_is_told_every_difference(saved, build, words):
    with pytest.raises(ConfigError, match=words):
        mdl_vars_from_nnx(NnxModel(build), saved[1] / "state")


@pytest.mark.parametrize(
    ("settings", "rules", "words"),
    [
        ({"hidden": 11}, {}, r"layers/0/kernel.*float32\[11, 11\].*float32\[13, 13\]"),
        ({}, {"step": 3}, r"CheckpointLoadingRules\.step"),
        ({}, {"load_step": True}, "load_step"),
        ({}, {"load_opt_states": True}, "opt_states/"),
    ],
)
def test_rules_that_it_cannot_meet_are_refused(saved, mesh_of, settings, rules, words):
    key = str(saved[1] / "state")
    target = partitioner(mesh_of(1, 1, 1), **settings)
    with pytest.raises(ConfigError, match=words):
        plan_init(target.layout, {key: CheckpointLoadingRules(**LOAD, **rules)})


def damaged(folder, name):
    """Returns a copy of a checkpoint with one thing wrong."""
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    # All data, for Orbax may leave files that the manifest does not name, and nobody reads.
    data = list(copy.rglob("d/*"))
    if name == "cut":
        for path in data:
            os.truncate(path, path.stat().st_size // 2)
    elif name == "gone":
        for path in data:
            path.unlink()
    elif name == "empty":
        (copy / "manifest.ocdbt").write_bytes(b"")
    elif name == "renamed":
        (copy / "manifest.ocdbt").rename(copy / "manifest")
    return copy


@pytest.mark.parametrize("name", ["cut", "gone", "empty", "renamed"])
def test_a_damaged_or_foreign_folder_is_refused_in_words(saved, name):
    with pytest.raises(ConfigError, match=rf"/{name}\b"):
        mdl_vars_from_nnx(NnxModel(Net), damaged(saved[1] / "state", name))
