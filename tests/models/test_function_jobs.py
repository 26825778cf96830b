"""Jobs of plain functions through `main`: trained, evaluated, decoded and loaded."""

import json

import fiddle as fdl
import jax
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.config.config_json import load_config
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.experiments.vision import digits
from praxis_lite.job.job_dir import JobDir
from tests.support.job_runs import home, launch, lines_of, loaded, succeed

pytestmark = pytest.mark.slow

NUM_STEPS = 31
SETTINGS = (
    "--exp=functions.DigitsMlp",
    "--set",
    f"run.num_train_steps={NUM_STEPS}",
    "run.evaluation.every_steps=None",
    "task.learner.learning_rate=0.01",
)


@pytest.fixture(scope="module")
def job():
    trained = JobDir(home() / "functions")
    succeed(*SETTINGS, f"--job_log_dir={trained.path}")
    return trained


def state_of(job):
    built = fdl.build(load_config(job.config_json.read_text()).config)
    partitioner = Partitioner(built.task, make_mesh(built.mesh))
    with Checkpoints(job.checkpoints) as saved:
        restored = saved.restore(partitioner.layout, partitioner.mesh)
    assert restored.step == NUM_STEPS
    return jax.device_get(restored.state), partitioner.layout


def logits_of(job):
    """Returns logits [359, 10] of the held-out images by NumPy, with the weights of a job."""
    state, layout = state_of(job)
    params = jax.tree.map(
        lambda x, true: x[tuple(slice(dim) for dim in true.shape)],
        state.mdl_vars["params"],
        layout.shapes.mdl_vars["params"],
    )
    x = digits("heldout")["inputs"].reshape(359, 64)
    for layer in ("0", "1", "2"):
        x = np.maximum(x, 0.0) @ params[layer]["w"] + params[layer]["b"]
    return x


def test_evaluation_is_the_mean_over_the_true_rows_of_a_last_batch_that_is_filled_up(job):
    succeed("--mode=eval", f"--job_log_dir={job.path}")
    trained, evaluated = lines_of(job.eval_metrics_jsonl)
    assert evaluated == trained
    logits, labels = logits_of(job), digits("heldout")["labels"]
    assert len(labels) % 61  # Filler rows, which would be counted as some digit.
    xent = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]
    assert evaluated["loss"] == pytest.approx(xent.mean(), abs=1e-5)
    assert evaluated["accuracy"] == pytest.approx((logits.argmax(-1) == labels).mean(), abs=1e-6)
    assert evaluated["accuracy"] > 0.8


def test_decoding_writes_a_prediction_per_image(job):
    done = succeed("--mode=decode", f"--job_log_dir={job.path}")
    assert f"decoded 359 records of heldout with the weights of step {NUM_STEPS}" in done.out
    text = job.decode_jsonl("heldout", NUM_STEPS).read_text()
    labels, predicted = digits("heldout")["labels"].tolist(), logits_of(job).argmax(-1).tolist()
    expected = [{"digit": d, "label": n} for d, n in zip(predicted, labels, strict=True)]
    assert [json.loads(line) for line in text.splitlines()] == expected


def test_decoding_without_predict_is_refused_before_anything_compiles(job):
    done = launch("--mode=decode", f"--job_log_dir={job.path}", "--set", "task.predict=None")
    assert done.code == 2 and "LossTask.predict" in done.err
    assert done.num_compiled == 0


def test_a_loaded_model_predicts_as_the_task_and_as_numpy_do(job):
    model = loaded(job)
    images, labels = (digits("heldout")[name] for name in ("inputs", "labels"))
    actual = model.predict({"inputs": images, "labels": labels})
    np.testing.assert_array_equal(actual["digit"], logits_of(job).argmax(-1))
    assert model.decode("heldout")[:7] == [
        {"digit": int(digit), "label": int(label)}
        for digit, label in zip(actual["digit"][:7], labels[:7], strict=True)
    ]
    with pytest.raises(ConfigError, match="LossTask"):
        model.generate("a digit")
