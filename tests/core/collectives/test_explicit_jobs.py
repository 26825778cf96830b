"""Jobs with explicit collectives through `main`; their checkpoints in the jit partitioner."""

import shutil
from unittest import mock

import fiddle as fdl
import jax
import numpy as np
import pytest

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.config.config_json import load_config
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.experiments import explicit
from praxis_lite.inputs import InMemory
from praxis_lite.job.job_dir import JobDir
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.job_runs import home, launch, lines_of, succeed

pytestmark = pytest.mark.slow

SAVED_EVERY, NUM_STEPS = 3, 7
# 60 rows: four microbatches of both partitioners; 64 for eight devices.
SETTINGS = (
    "--exp=explicit.DigitsFsdp",
    "--set",
    f"run.checkpoints.every_steps={SAVED_EVERY}",
    "run.evaluation.every_steps=None",
    "task.model.module.hidden_size=37",
    "task.model.module.dtype=float32",
    "datasets.train.batch_size=60",
    "task.learner.learning_rate=0.01",
)
NO_DROPOUT = "task.model.module.dropout_rate=0.0"


def steps(number):
    return f"run.num_train_steps={number}"


def by_the_compiler():
    return mock.patch.object(explicit.NotebookDp, "partitioner", lambda self: None)


@pytest.fixture(scope="module")
def job():
    trained = JobDir(home() / "explicit")
    succeed(*SETTINGS, steps(NUM_STEPS), f"--job_log_dir={trained.path}")
    return trained


def state_of(job):
    built = fdl.build(load_config(job.config_json.read_text()).config)
    partitioner = explicit_partitioner(built.task, make_mesh(built.mesh))
    with Checkpoints(job.checkpoints) as saved:
        return saved.restore(partitioner.layout, partitioner.mesh).state


def test_a_job_is_evaluated(job):
    done = succeed("--mode=eval", f"--job_log_dir={job.path}")
    trained, evaluated = lines_of(job.eval_metrics_jsonl)[-2:]
    assert evaluated == trained
    assert f"accuracy {trained['accuracy']:.4f}" in done.out


def test_the_state_is_that_of_the_other_partitioner(job):
    """Which is what a checkpoint is restored by."""
    built = fdl.build(load_config(job.config_json.read_text()).config)
    mesh = make_mesh(built.mesh)
    assert explicit_partitioner(built.task, mesh).layout == Partitioner(built.task, mesh).layout


def test_a_checkpoint_goes_on_in_the_other_partitioner_and_back(job, tmp_path):
    settings = (*SETTINGS, NO_DROPOUT)  # Whose draws are the devices' own.
    by_hand, mixed = (JobDir(shutil.copytree(job.path, tmp_path / n)) for n in ("a", "b"))
    succeed(*settings, steps(9), f"--job_log_dir={by_hand.path}")
    with by_the_compiler():
        done = succeed(*settings, steps(8), f"--job_log_dir={mixed.path}")
    assert "restored the checkpoint of step 7" in done.out
    assert "ExplicitCollectives" not in mixed.config_txt.read_text()
    done = succeed(*settings, steps(9), f"--job_log_dir={mixed.path}")
    assert "restored the checkpoint of step 8" in done.out
    expected, actual = (lines_of(job.metrics_jsonl)[NUM_STEPS:] for job in (by_hand, mixed))
    assert [item["step"] for item in actual] == [8, 9]
    for a, b in zip(actual, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        state_of(mixed),
        state_of(by_hand),
    )


def test_rows_without_weights_are_refused_before_anything_compiles():
    spec = InMemory.element_spec

    def without_weights(self):
        return {name: x for name, x in spec(self).items() if name != "weights"}

    with mock.patch.object(InMemory, "element_spec", without_weights):
        done = launch(*SETTINGS, steps(NUM_STEPS), f"--job_log_dir={home() / 'refused'}")
    assert done.code != 0 and done.num_compiled == 0
    assert "60 rows cannot be split evenly over 8 devices" in done.err and "'weights'" in done.err
