"""Jobs of users' NNX models through `main`: trained, stopped, resumed, evaluated."""

import functools

import fiddle as fdl
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.config.config_json import load_config_file
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.job.job_dir import JobDir
from tests.support.job_runs import as_it_died, home, launch, lines_of, succeed

pytestmark = pytest.mark.slow

NUM_STEPS, SAVED_EVERY = 7, 3

PACKAGE = '''
"""A user's package: a network as Flax's guides write one."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from praxis_lite.experiments.nnx_guide import noise, squared_error
from praxis_lite import Experiment, MeshConfig, RunConfig, SaveSettings, register
from praxis_lite.inputs import InMemory
from praxis_lite.core.learner.learner import Learner
from praxis_lite.tasks.loss import LossTask

LAYERS = {nnx.PARTITION_NAME: "layers"}


class Block(nnx.Module):
    def __init__(self, depth, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.linear = nnx.Linear(depth, depth, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(depth, momentum=0.75, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jax.nn.relu(self.norm(self.linear(x))))


class Net(nnx.Module):
    def __init__(self, depth, num_layers, rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(transform_metadata=LAYERS)
        def create(rngs):
            return Block(depth, rngs)

        self.blocks = create(rngs)
        self.out = nnx.Linear(depth, depth, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=LAYERS)
        @nnx.remat
        def apply(x, block):
            return block(x)

        return self.out(apply(x, self.blocks))


@register
class Deep(Experiment):
    """Batch norm, dropout and a scanned stack."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(2, 4), axis_names=("data", "model"))

    def task(self):
        learner = fdl.Config(Learner, fdl.Partial(optax.adam), learning_rate=1e-2)
        return fdl.Config(
            LossTask, fdl.Partial(Net, depth=13, num_layers=3), squared_error, learner,
            inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
        )

    def datasets(self):
        arrays = fdl.Partial(noise, depth=13)
        return {"train": fdl.Config(InMemory, arrays, batch_size=7, shuffle=True),
                "heldout": fdl.Config(InMemory, arrays, batch_size=8, shuffle=False)}

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=7, checkpoints=fdl.Config(SaveSettings, every_steps=3)
        )
'''

SETTINGS = ("--exp=nnxzoo.experiments.Deep", "--packages=nnxzoo")


@functools.cache
def jobs():
    """Returns a job trained in one go, and one that died and went on."""
    (home() / "nnxzoo").mkdir(exist_ok=True)
    (home() / "nnxzoo/experiments.py").write_text(PACKAGE)
    whole = JobDir(home() / "nnx")
    succeed(*SETTINGS, f"--job_log_dir={whole.path}")
    resumed = as_it_died(whole, SAVED_EVERY)
    done = succeed(*SETTINGS, f"--job_log_dir={resumed.path}")
    assert f"restored the checkpoint of step {SAVED_EVERY}" in done.out
    return whole, resumed


def state_of(job):
    built = fdl.build(load_config_file(job.config_json, packages=["nnxzoo"]).config)
    partitioner = Partitioner(built.task, make_mesh(built.mesh))
    with Checkpoints(job.checkpoints) as saved:
        return saved.restore(partitioner.layout, partitioner.mesh)


def test_a_job_that_died_ends_as_one_that_did_not():
    whole, resumed = jobs()
    assert [line["step"] for line in lines_of(resumed.metrics_jsonl)] == [*range(1, NUM_STEPS + 1)]
    assert lines_of(resumed.metrics_jsonl) == lines_of(whole.metrics_jsonl)
    assert lines_of(resumed.eval_metrics_jsonl) == lines_of(whole.eval_metrics_jsonl)
    actual, expected = state_of(resumed), state_of(whole)
    assert actual.step == expected.step == NUM_STEPS
    jax.tree.map(np.testing.assert_array_equal, actual.state, expected.state)


def test_an_evaluation_by_itself_gives_the_metrics_of_the_jobs_last():
    job = jobs()[0]
    before = lines_of(job.eval_metrics_jsonl)
    succeed("--mode=eval", f"--job_log_dir={job.path}")
    assert lines_of(job.eval_metrics_jsonl)[len(before) :] == before[-1:]


def test_statistics_are_kept_and_streams_are_not():
    mdl_vars = state_of(jobs()[0]).state.mdl_vars
    kept = mdl_vars["non_trainable"]
    assert set(kept) == {"blocks"} and set(kept["blocks"]) == {"norm"}
    assert np.ptp(np.asarray(kept["blocks"]["norm"]["var"])) > 0.1
    kernel = mdl_vars["params"]["blocks"]["linear"]["kernel"]
    assert kernel.shape == (3, 13, 16) and kernel.sharding.spec == P(None, None, "model")


def test_masks_and_statistics_do_not_depend_on_the_mesh(tmp_path):
    item = ("--set", "mesh.ici_mesh_shape=1,1", "run.num_train_steps=3")
    whole = jobs()[0]
    succeed(*SETTINGS, f"--job_log_dir={tmp_path}", *item)
    losses, alone = (
        [line["loss"] for line in lines_of(job.metrics_jsonl)][:3]
        for job in (whole, JobDir(tmp_path))
    )
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_an_axis_that_the_mesh_has_not_is_an_error_before_anything_compiles(tmp_path):
    argv = "--exp=praxis_lite.experiments.nnx_guide.DotReluDot", "--set", "mesh.axis_names=data,mdl"
    done = launch(*argv, f"--job_log_dir={tmp_path}")
    assert done.code == 2 and done.num_compiled == 0
    assert "dot1/kernel: the name 'model' " in done.err
