"""A job that was stopped goes on bit for bit: metrics, weights, slots, keys, averages, data."""

import contextlib
import functools
import json
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.checkpoints.digest import leaf_digests
from praxis_lite.core import constrain
from praxis_lite.inputs.numpy_data import TextWindows
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job.job_dir import JobDir
from praxis_lite.layers import Dropout
from tests.support.float16 import HAS_FLOAT16
from tests.support.job_runs import home, lines_of, succeed
from tests.support.marks import needs_tensorflow

NUM_STEPS = 11
MESHES = [(1, 1, 1), (1, 4, 2), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 3, 2)]
EXP = "--exp=jobzoo.resuming.Everything"

EXPERIMENT = '''
"""One job with all that a step carries on: see `Net` and `task`."""

import functools
import os

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax

from jobzoo.experiments import Tiny
from praxis_lite import register
from praxis_lite.inputs import FromDataset, WithWorkers, numpy_data, tf_data
from praxis_lite.inputs.tensorflow_import import tensorflow
from praxis_lite.layers import BatchNorm, Dropout, Linear
from praxis_lite.core.learner.learner import Learner
from praxis_lite.optimizers.loss_scaling import DynamicLossScale
from praxis_lite.core.learner.optimizer_groups import AuxiliaryOptimizer
from praxis_lite.layers.base.base_layer import BaseLayer
from tests.support.float16 import HALF
from praxis_lite.tasks.loss import LossTask


class Net(BaseLayer):
    """Dropout and batch norm between two products."""

    def __init__(self, dtype=HALF, *, rngs):
        self.first = Linear(5, 7, weight_split_dims_mapping=("data", "mdl"), rngs=rngs)
        self.norm = BatchNorm(7, decay=0.7, rngs=rngs)
        self.dropout = Dropout(0.3)
        self.second = Linear(7, 5, weight_split_dims_mapping=("mdl", "data"), rngs=rngs)
        self.dtype = dtype

    def __call__(self, ids, key):
        x = self.norm(self.first(ids.astype(self.dtype) / 256), key=key)
        kept = self.dropout(jnp.ones_like(x), key)
        # The mask as a whole number per row: any bit of it shows.
        mask = jnp.sum((kept != 0) * 2.0 ** jnp.arange(7)[None], axis=1, dtype=jnp.float32)
        return self.second(x * kept).astype(jnp.float32), mask


def loss(net, inputs, key):
    outputs, mask = net(inputs["ids"], key)
    of_row = jnp.ones_like(outputs) * mask[:, None]
    return jnp.square(outputs - inputs["labels"] / 256), {"mask": of_row}


def windows(pipeline):
    """Returns the batches of a pipeline as a dataset of examples, shuffled once more."""
    tf = tensorflow("this test")

    def rows(index):
        batch = pipeline.rows(int(index), slice(0, pipeline.batch_size))
        return batch["ids"], batch["labels"]

    def batch(index):
        ids, labels = tf.numpy_function(rows, [index], (tf.int32, tf.int32))
        shape = (pipeline.batch_size, pipeline.seq_len)
        return {"ids": tf.ensure_shape(ids, shape), "labels": tf.ensure_shape(labels, shape)}

    return tf.data.Dataset.range(2**40).map(batch, num_parallel_calls=3).unbatch().shuffle(17)


@register
class Everything(Tiny):
    """Dropout, batch norm, halves with a loss scale, two optimizers, averages, accumulation."""

    dtype = HALF

    def task(self):
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adafactor, min_dim_size_to_factor=2),
            learning_rate=fdl.Config(
                optax.linear_schedule, init_value=3e-2, end_value=1e-3, transition_steps=20
            ),
            auxiliary_optimizers=(
                fdl.Config(
                    AuxiliaryOptimizer, regex="second/", name="second",
                    optimizer=fdl.Partial(optax.adamw), learning_rate=1e-2,
                ),
            ),
            clip_gradient_norm_to_value=1.0,
            ema_decay=0.7,
            gradient_accumulation_steps=2,
            # Step 1 overflows, and step 8, once the scale has grown. The last step is kept.
            loss_scale=fdl.Config(DynamicLossScale, initial_scale=2.0**15, growth_interval=6),
        )
        batch = ("replica", "data")
        return fdl.Config(
            LossTask, fdl.Partial(Net, dtype=self.dtype), loss, learner,
            inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
        )

    def datasets(self):
        settings = dict(batch_size=26, seq_len=5)
        of_numpy = fdl.Config(
            numpy_data.TextWindows, self.corpus, "train", shuffle=True, **settings
        )
        train = {
            "numpy": lambda: of_numpy,
            "tf": lambda: fdl.Config(
                tf_data.TextWindows, self.corpus, "train", shuffle=True, **settings
            ),
            "processes": lambda: fdl.Config(WithWorkers, of_numpy, num_workers=3),
            "threads": lambda: fdl.Config(WithWorkers, of_numpy, num_workers=2, kind="threads"),
            "dataset": lambda: fdl.Config(
                FromDataset, fdl.Partial(windows, pipeline=of_numpy), batch_size=26, seed=5
            ),
        }[os.environ["JOBZOO_DATA"]]()
        heldout = fdl.Config(
            numpy_data.TextWindows, self.corpus, "heldout", shuffle=False, batch_size=997,
            seq_len=5,
        )
        return {"train": train, "heldout": heldout}

    def run(self):
        run = super().run()
        run.num_train_steps, run.checkpoints.every_steps, run.evaluation.every_steps = 11, 3, 4
        run.checkpoints.max_to_keep, run.evaluation.use_ema_states = 9, True
        return run


@register
class InFloat32(Everything):
    """The same for longer, and without what rounds or decides by the last bit."""

    dtype = jnp.float32

    def task(self):
        task = super().task()
        task.learner.loss_scale = None
        return task

    def run(self):
        run = super().run()
        run.num_train_steps = 100
        run.checkpoints.every_steps = run.evaluation.every_steps = None
        return run
'''


@functools.cache
def module():
    """Writes the experiments above into the package of this process's jobs."""
    (home() / "jobzoo/resuming.py").write_text(EXPERIMENT)


def run(job, data, *argv, started=succeed, exp=EXP):
    module()
    with mock.patch.dict("os.environ", {"JOBZOO_DATA": data}):
        return started(exp, f"--job_log_dir={job.path}", *argv)


@contextlib.contextmanager
def stopped_at(batch):
    """Stops the job that is launched inside where it asks for a training batch, of any pipeline."""
    batches = DataPosition.batches

    def stopping(self, *args):
        for index, item in batches(self, *args):
            if index == batch:
                raise RuntimeError("the plug was pulled")
            yield index, item

    with (
        mock.patch.object(DataPosition, "batches", stopping),
        pytest.raises(AssertionError, match="the plug was pulled"),  # The launch did not succeed.
    ):
        yield


@functools.cache
def uninterrupted(data):
    job = JobDir(home() / f"uninterrupted_{data}")
    run(job, data)
    return job


def assert_the_same(job, whole):
    for name in ("metrics_jsonl", "eval_metrics_jsonl"):
        actual, expected = (lines_of(getattr(item, name)) for item in (job, whole))
        assert actual == expected
    assert [line["step"] for line in lines_of(job.metrics_jsonl)] == [*range(1, NUM_STEPS + 1)]
    # Weights, batch statistics, slots of both optimizers, averages, counts, the loss scale.
    actual, expected = (leaf_digests(x.checkpoints / str(NUM_STEPS)) for x in (job, whole))
    assert actual == expected
    actual, expected = (
        json.loads((element.checkpoints / str(NUM_STEPS) / "manifest.json").read_text())["data"]
        for element in (job, whole)
    )
    assert actual == expected


def test_the_job_carries_on_all_that_a_step_can_carry_on():
    """What the tests below would not see if it were not there."""
    steps = lines_of(uninterrupted("numpy").metrics_jsonl)
    assert steps[-1]["num_skipped_steps"] > 0 or not HAS_FLOAT16
    assert len({line["mask"] for line in steps}) > NUM_STEPS - 2
    leaves = " ".join(leaf_digests(uninterrupted("numpy").checkpoints / str(NUM_STEPS)))
    for name in ("moving_mean", "v_row", "/mu/", "ema", "scale", "num_skipped_steps"):
        assert name in leaves, leaves


@pytest.mark.slow
def test_pipelines_and_workers_may_change_at_each_resume(tmp_path):
    job, whole = JobDir(tmp_path), uninterrupted("numpy")
    # Each goes on from a checkpoint before the batch that it never got: 3, 6 and 9.
    for data, batch in [("numpy", 4), ("processes", 7), ("tf", 9)]:
        with stopped_at(batch):
            run(job, data)
    done = run(job, "threads")
    assert "restored the checkpoint of step 9" in done.out
    assert "not deterministic" not in done.out
    assert_the_same(job, whole)


@needs_tensorflow
@pytest.mark.slow
def test_a_users_dataset_goes_on_too(tmp_path):
    job = JobDir(tmp_path)
    with stopped_at(7):
        run(job, "dataset")
    done = run(job, "dataset")
    assert "recomputing 6 batches before batch 6" in done.out
    assert "not deterministic" not in done.out
    assert_the_same(job, uninterrupted("dataset"))


def cut_and_torn(job):
    lines = job.metrics_jsonl.read_text().splitlines(keepends=True)
    job.metrics_jsonl.write_text("".join(lines[:5]) + lines[5][:17])
    return [1, 2, 3, 4, 5]


def lost(job):
    job.metrics_jsonl.unlink()
    return []


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut_and_torn, lost])
def test_each_later_step_stands_once_whatever_became_of_metrics_jsonl(tmp_path, damage):
    job = JobDir(tmp_path / "job")
    shutil.copytree(uninterrupted("numpy").path, job.path)
    kept = damage(job)
    with mock.patch.object(TextWindows, "nondeterminism", lambda self: "it throws dice"):
        done = run(job, "numpy", "--set", "run.num_train_steps=12")
    for name in ("train", "heldout"):
        assert (
            f"datasets.{name} is not deterministic: it throws dice; a resumed run will see "
            "different batches\n"
        ) in done.out
    lines = lines_of(job.metrics_jsonl)
    assert [line["step"] for line in lines] == [*kept, NUM_STEPS + 1]
    assert lines[:-1] == lines_of(uninterrupted("numpy").metrics_jsonl)[: len(kept)]
    assert f"metrics.jsonl has lines for only {len(kept)} of {NUM_STEPS} steps;" in done.out
    assert job.loss_curve_png.exists()


@pytest.mark.slow
def test_dropout_masks_have_the_same_bits_on_six_meshes(mesh_of):
    split = (("replica", "data"), None, "mdl")
    shape = (11, 13, 29)  # Uneven on all meshes but the first.

    def mask(key):
        return Dropout(0.3)(constrain(jnp.ones(shape), split), key)

    expected = np.asarray(Dropout(0.3)(jnp.ones(shape), jax.random.key(3)))
    assert 0.25 < np.mean(expected == 0) < 0.35
    for mesh_shape in MESHES:
        with jax.set_mesh(mesh_of(*mesh_shape)):
            # Replicated at the end, for an uneven array cannot leave a program split.
            found = jax.jit(lambda key: constrain(mask(key), (None, None, None)))(jax.random.key(3))
        np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.slow
def test_a_job_that_goes_through_meshes_is_that_of_one_over_100_steps(tmp_path):
    meshes = [(2, 2, 2), (1, 3, 2)]
    exp = "--exp=jobzoo.resuming.InFloat32"
    job, whole = JobDir(tmp_path / "many"), JobDir(tmp_path / "one")
    run(whole, "numpy", "--set", "mesh.ici_mesh_shape=1,1,1", exp=exp)
    ends = [round(100 * k / len(meshes)) for k in range(1, len(meshes) + 1)]
    for shape, end in zip(meshes, ends, strict=True):
        mesh = ",".join(map(str, shape))
        done = run(
            job,
            "numpy",
            "--set",
            f"mesh.ici_mesh_shape={mesh}",
            f"run.num_train_steps={end}",
            exp=exp,
        )
    assert f"restored the checkpoint of step {ends[-2]}" in done.out
    assert "mesh.ici_mesh_shape: 2,2,2 -> 1,3,2" in done.out
    actual, expected = (lines_of(item.metrics_jsonl) for item in (job, whole))
    assert [line["step"] for line in actual] == [*range(1, 101)]
    for name in ("loss", "grad_norm", "learning_rate"):
        values = ([line[name] for line in lines] for lines in (actual, expected))
        np.testing.assert_allclose(*values, atol=1e-5, rtol=0, err_msg=name)
    # Whole numbers: the masks' bits, and what the learner counts.
    for name in ("mask", "num_skipped_steps"):
        assert [line[name] for line in actual] == [line[name] for line in expected], name
