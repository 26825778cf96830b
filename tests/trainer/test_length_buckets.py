"""Compares jobs with length buckets to padded rows on one device, also after interruptions."""

import functools
import json

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.inputs import Documents, JsonLines, PackedText, PreferenceData
from praxis_lite.job.job_dir import JobDir
from praxis_lite.layers import rotary_lm, set_sharding_params, with_reference
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from praxis_lite.tasks.preference import DpoTask
from praxis_lite.trainer.checks import datasets
from praxis_lite.trainer.compilation import compile_step
from praxis_lite.trainer.evaluation import Evaluator
from tests.decode.toy_models import num_compiled
from tests.support import process_pairs
from tests.support.commands import praxis
from tests.support.job_runs import as_it_died, home, launch, lines_of, succeed
from tests.support.lm_runs import on_host, zero_padded

SHAPES = {(8, 23), (16, 11), (32, 5)}

BUCKETED = '''
import fiddle as fdl
import jax.numpy as jnp
import optax

from jobzoo.experiments import TEXTS
from praxis_lite import Experiment, MeshConfig, RunConfig, SaveSettings, register
from praxis_lite.core import Learner
from praxis_lite.inputs import Documents, JsonLines, PackedText
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask


def init(key):
    return {"w": jnp.arange(37.0) / 37}


def loss(params, inputs, key):
    w, counts = params["w"], 1 + inputs["segment_pos"]
    return jnp.square(jnp.cumsum(w[inputs["ids"]], axis=1) / counts - w[inputs["labels"]])


@register
class Bucketed(Experiment):
    """Predicts a learned number of each token from the mean of the numbers before it."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def task(self):
        learner = fdl.Config(
            Learner, optimizer=fdl.Partial(optax.sgd), learning_rate=0.1,
            gradient_accumulation_steps=4,
        )
        return fdl.Config(LossTask, fdl.Config(FunctionModel, init), loss, learner)

    def datasets(self):
        documents = fdl.Config(Documents, fdl.Config(JsonLines, f"{TEXTS}/ids.jsonl"), "ids")

        train = fdl.Config(
            PackedText, documents, "train", batch_size=8, seq_len=23, packing=False,
            bucket_lengths=(5, 11), shuffle=True,
        )
        return {"train": train}

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=9, checkpoints=fdl.Config(SaveSettings, every_steps=4)
        )
'''
EXP = "--exp=jobzoo.bucketed.Bucketed"


@pytest.fixture(scope="module", autouse=True)
def files():
    """Writes the experiment, and documents of 2 to 31 ids."""
    rng = np.random.default_rng(1)
    lines = [{"ids": rng.integers(0, 37, rng.integers(2, 32)).tolist()} for _ in range(101)]
    (home() / "texts/ids.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home() / "jobzoo/bucketed.py").write_text(BUCKETED)


@functools.cache
def bucketed() -> JobDir:
    """Returns a job that trained without interruption. Tests share it and must not modify it."""
    job = JobDir(home() / "bucketed")
    succeed(EXP, f"--job_log_dir={job.path}")
    return job


def losses(job):
    return [line["loss"] for line in lines_of(job.metrics_jsonl)]


@pytest.mark.slow
def test_a_killed_job_resumes_with_the_next_batch_and_uses_every_row_once_and_in_order(capsys):
    job = as_it_died(bucketed(), 4)
    succeed(EXP, f"--job_log_dir={job.path}")
    assert losses(job) == losses(bucketed()) and len(losses(job)) == 9
    assert praxis("inputs", "digest", f"--job={job.path}", "--packages=jobzoo") == 0
    proof = "every example exactly once, in order: the record is complete, and it matches"
    assert proof in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path):
    job = JobDir(tmp_path / "job")
    ended = process_pairs.run(EXP, f"--job_log_dir={job.path}", cwd=home())
    assert [process.code for process in ended] == [0, 0], ended
    np.testing.assert_allclose(losses(job), losses(bucketed()), rtol=1e-6)


def test_two_processes_require_a_batch_size_that_is_a_multiple_of_the_devices(monkeypatch):
    from jobzoo.bucketed import Bucketed

    config = Bucketed().config()
    config.datasets["train"].batch_size = 12
    job = fdl.build(config)
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    datasets.check_datasets(job, partitioner, "datasets", "explain")
    monkeypatch.setattr(datasets.processes, "count", lambda: 2)
    with pytest.raises(ConfigError, match="datasets.train.batch_size is 12"):
        datasets.check_datasets(job, partitioner, "datasets", "explain")


@pytest.mark.slow
def test_a_job_can_be_explained_and_planned():
    out = launch("--mode=explain", EXP).out
    for rows, length in SHAPES:
        assert out.count(f"[{rows}, {length}]") > 0
    assert out.count("train_step, batches of train") == len(SHAPES)
    out = launch("--mode=plan", EXP, "--topology=cpu:8").out
    for rows, _ in SHAPES:
        assert f"train_step, batches of train, {rows} rows" in out


def language_model():
    lm = rotary_lm(
        vocab_size=37, model_dims=13, hidden_dims=29, num_heads=3, dim_per_head=6, num_layers=2
    )
    splits = {"map_2d": (("replica", "data"), None)}
    model = fdl.build(set_sharding_params(lm))
    return LanguageModelTask(model, Learner(optax.sgd, 0.1), inputs_split_mapping=splits)


def mean_of_tokens():
    from jobzoo.bucketed import init, loss

    return LossTask(FunctionModel(init), loss, Learner(optax.sgd, 0.1))


def preferences():
    """DPO, whose batches contain pairs of sides of different lengths."""
    lm = rotary_lm(
        vocab_size=257, model_dims=13, hidden_dims=29, num_heads=3, dim_per_head=6, num_layers=1
    )
    model = fdl.build(fdl.Partial(with_reference, base_tpl=set_sharding_params(lm)))
    batch = ("replica", "data")
    splits = {"map_1d": (batch,), "map_3d": (batch, None, None)}
    learner = Learner(optax.sgd, 0.1, bprop_variable_exclusion="reference/.*")
    # A larger beta amplifies the rounding errors of log-probabilities, which are sums over tokens.
    return DpoTask(model, learner, beta=0.1, inputs_split_mapping=splits)


def partitioner_on(shape, task, accumulation_steps=1):
    task.learner.gradient_accumulation_steps = accumulation_steps
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


def rows(**settings):
    documents = Documents(JsonLines(str(home() / "texts/ids.jsonl")), "ids")
    settings = {"bucket_lengths": (5, 11), "shuffle": False} | settings
    return PackedText(documents, "train", 8, 23, packing=False, **settings)


def pairs():
    """Returns pairs whose longer side has 3 to 22 labels."""
    rng, path = np.random.default_rng(3), home() / "texts/pairs.jsonl"
    lines = [
        {"prompt": "?", "chosen": "y" * a, "rejected": "n" * b}
        for a, b in rng.integers(2, rng.choice([5, 9, 21], (97, 1)), (97, 2)).tolist()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"heldout_percent": 0, "bucket_lengths": (7, 11), "shuffle": False}
    return PreferenceData(str(path), "train", 8, 23, **settings)


def padded(batch):
    """Returns a batch padded to 32 rows of 23 tokens."""
    rows, tokens = 32 - batch["ids"].shape[0], 23 - batch["ids"].shape[-1]

    def pads(x):
        between = [(0, 0)] * (x.ndim - 2)
        return [(0, rows), *between, (0, tokens)] if x.ndim > 1 else [(0, rows)]

    return {name: np.pad(x, pads(x)) for name, x in batch.items()}


def train(partitioner, initial, batches):
    """Returns the losses and their weights, and the final weights of the model."""
    layout, key, outputs = partitioner.layout, partitioner.key(0), []
    state = jax.tree.map(zero_padded, initial, layout.padded_shapes)
    state = jax.device_put(state, layout.shardings(partitioner.mesh))
    for batch in batches:
        state, output = partitioner.train_step(state, partitioner.global_batch(batch), key)
        outputs.append(jax.device_get(output["metrics"]["loss"]))
    return np.array(outputs), on_host(layout, state).mdl_vars["params"]


@pytest.mark.parametrize(
    ("task", "data", "accumulation_steps"),
    [
        (mean_of_tokens, rows, 4),
        pytest.param(language_model, rows, 1, marks=pytest.mark.slow),
        pytest.param(preferences, pairs, 4, marks=pytest.mark.slow),
    ],
)
def test_buckets_train_like_padded_rows_with_one_program_per_bucket(task, data, accumulation_steps):
    """With rows of different lengths, microbatches have different weights."""
    batches = list(data().batches())
    assert len({batch["ids"].shape for batch in batches}) == len(SHAPES)
    # The reference is a single batch on one device.
    reference = partitioner_on((1, 1, 1), task())
    initial = on_host(reference.layout, reference.init(reference.key(0)))
    expected, expected_params = train(reference, initial, map(padded, batches))
    partitioner = partitioner_on((1, 4, 2), task(), accumulation_steps)
    actual, params = train(partitioner, initial, batches)
    assert partitioner.train_step.num_compiled() == len(SHAPES)
    np.testing.assert_array_equal(actual[:, 1], expected[:, 1])
    np.testing.assert_allclose(actual[:, 0], expected[:, 0], rtol=2e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), params, expected_params)


def test_every_shape_is_compiled_before_the_first_step():
    partitioner = partitioner_on((1, 4, 2), mean_of_tokens())
    key = partitioner.key(0)
    state, batches = partitioner.init(key), map(partitioner.global_batch, rows().batches())
    compile_step(partitioner.train_step, rows(), "datasets.train")
    before = num_compiled()
    for batch in batches:
        state, _ = partitioner.train_step(state, batch, key)
    assert num_compiled() == before


def test_evaluations_of_buckets_and_padded_rows_are_equal():
    partitioner = partitioner_on((1, 4, 2), mean_of_tokens())
    pipelines = {"bucketed": rows(), "padded": rows(bucket_lengths=())}
    state = partitioner.init(partitioner.key(0))
    results = Evaluator(partitioner, pipelines, None).run(0, state.mdl_vars)
    assert results["bucketed"]["loss"] == pytest.approx(results["padded"]["loss"], rel=1e-6)
    assert partitioner.eval_step.num_compiled() == len(SHAPES)
