"""Jobs of plain Linen models through `main`: trained, stopped, resumed, evaluated and decoded."""

import functools
import json

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.config.config_json import load_config_file
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.experiments import linen
from praxis_lite.experiments.linen_models import CausalLm
from praxis_lite.job.job_dir import JobDir
from tests.support.job_runs import home, lines_of, succeed

pytestmark = pytest.mark.slow

NUM_STEPS, SAVED_EVERY = 5, 2
TINY_LM = '''
import fiddle as fdl

from praxis_lite.experiments import linen
from jobzoo.experiments import Tiny
from praxis_lite import register


@register
class TinyPyDocs(linen.PyDocs):
    """The LM with texts of this folder, without tensorflow."""

    def datasets(self):
        return Tiny().datasets()

    def decode_datasets(self):
        return Tiny().decode_datasets()
'''
RUN = (
    "--set",
    f"run.num_train_steps={NUM_STEPS}",
    f"run.checkpoints.every_steps={SAVED_EVERY}",
    "run.evaluation.every_steps=None",
)
SMALL = [
    f"task.model.module.{setting}"
    for setting in ("model_dims=15", "mlp_dims=7", "num_heads=3", "dropout=0.1")
]
SETTINGS = (
    "--exp=jobzoo.linen.TinyPyDocs",
    *RUN,
    *SMALL,
    "task.model.module.num_layers=2",
    "task.predict.num_tokens=4",
)


def start(folder):
    return (*SETTINGS, f"--job_log_dir={folder}")


@functools.cache
def trained_job():
    """Returns a job trained in one go."""
    (home() / "jobzoo/linen.py").write_text(TINY_LM)
    job = JobDir(home() / "linen")
    succeed(*start(job.path))
    return job


@functools.cache
def state_of(path):
    job = fdl.build(load_config_file(JobDir(path).config_json, packages=["jobzoo"]).config)
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    with Checkpoints(JobDir(path).checkpoints) as saved:
        restored = saved.restore(partitioner.layout, partitioner.mesh)
    assert restored.step == NUM_STEPS
    return jax.device_get(restored.state), partitioner, job


def params_of(path):
    """Returns the weights at their true shapes."""
    state, partitioner, _ = state_of(path)
    return jax.tree.map(
        lambda x, true: x[tuple(slice(dim) for dim in true.shape)],
        state.mdl_vars["params"],
        partitioner.layout.shapes.mdl_vars["params"],
    )


def test_evaluation_is_that_of_flax_with_the_weights_of_the_job():
    whole = trained_job()
    succeed("--mode=eval", f"--job_log_dir={whole.path}")
    trained, evaluated = lines_of(whole.eval_metrics_jsonl)
    assert evaluated == trained
    variables, job = {"params": params_of(whole.path)}, state_of(whole.path)[2]
    net, pipeline = job.task.model.linen_module, job.datasets["heldout"]
    assert isinstance(net, CausalLm)
    parts = [pipeline.rows(n, slice(0, pipeline.batch_size)) for n in range(pipeline.num_batches)]
    batch = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    logits = jax.jit(lambda: net.apply(variables, batch["ids"], train=False))()
    labels, weights = batch["labels"], batch["weights"]
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    assert evaluated["loss"] == pytest.approx(np.average(xent, weights=weights), abs=1e-5)
    correct = np.average(np.argmax(logits, -1) == labels, weights=weights)
    assert evaluated["accuracy"] == pytest.approx(correct, abs=1e-6)


def test_the_lm_decodes_as_flax_does():
    whole = trained_job()
    succeed("--mode=decode", f"--job_log_dir={whole.path}")
    text = whole.decode_jsonl("prompts", NUM_STEPS).read_text()
    actual = [json.loads(line)["ids"] for line in text.splitlines()]
    variables, job = {"params": params_of(whole.path)}, state_of(whole.path)[2]
    pipeline = job.decode_datasets["prompts"]
    prompts = pipeline.rows(0, slice(0, 3))
    assert len(actual) == 3
    apply = jax.jit(lambda ids: job.task.model.linen_module.apply(variables, ids, train=False))
    ids = np.pad(prompts["ids"], ((0, 0), (0, 4)))
    for n in range(4):
        last = prompts["prefix_lengths"] - 1 + n
        ids[np.arange(3), last + 1] = np.argmax(apply(jnp.asarray(ids)), -1)[np.arange(3), last]
    assert actual == ids.tolist()


def params_layout(task, mesh):
    leaves = Partitioner(task, make_mesh(mesh)).layout.select("mdl_vars").select("params").leaves()
    return {leaf.path: leaf for leaf in leaves}


def test_one_rule_splits_all_weights_of_layers_that_declare_nothing():
    job = fdl.build(linen.DigitsViT().config())
    params = params_layout(job.task, job.mesh)
    assert all(leaf.num_shards == 4 for leaf in params.values())
    [cls] = [leaf for path, leaf in params.items() if path == "cls"]
    assert cls.padded_shape == (1, 1, 4 * -(-cls.shape[2] // 4))  # It has no other dim.
