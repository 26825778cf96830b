"""load(): a job's trained model in Python gives what --mode=eval and --mode=decode give."""

import copy
import json

import jax
import numpy as np
import pytest

import praxis_lite
from praxis_lite import ConfigError, MeshConfig
from praxis_lite.checkpoints.stored_arrays import stored_arrays
from praxis_lite.checkpoints.tools import manifest_of
from praxis_lite.core import Partitioner
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.decode import BeamSearch, Greedy, Sample
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.every_case import assert_each
from tests.support.job_runs import copy_of_trained, loaded, succeed

pytestmark = pytest.mark.slow

ONE_DEVICE = "mesh.ici_mesh_shape=1,1,1"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The job that was trained on (1, 4, 2), evaluated and decoded on one device: its directory."""
    job = copy_of_trained(tmp_path_factory.mktemp("trained") / "job")
    for mode in ("eval", "decode"):
        succeed(f"--mode={mode}", f"--job_log_dir={job.path}", "--set", ONE_DEVICE)
    return job


@pytest.fixture(scope="module")
def model(job):
    return loaded(job)


@pytest.fixture(scope="module")
def model_on_eight(job):
    return loaded(job, mesh="job")


def evaluated(job, line=-1):
    actual = [x for x in read_json_lines(job.eval_metrics_jsonl) if x["dataset"] == "heldout"]
    return {k: v for k, v in actual[line].items() if k not in ("step", "dataset")}


def decoded(job):
    text = job.decode_jsonl("prompts", 7).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files_of(job):
    return {p: p.stat().st_mtime_ns for p in job.path.rglob("*")}


def test_it_has_the_checkpoints_weights_at_their_true_shapes(job, model, model_on_eight):
    step_dir = job.checkpoints / "7"
    stored = stored_arrays(step_dir, manifest_of(step_dir))
    wanted = {p.removeprefix("mdl_vars/"): x for p, x in stored.items() if p.startswith("mdl_vars")}
    assert model.step == model_on_eight.step == 7
    assert dict(model.partitioner.mesh.shape) == {"replica": 1, "data": 1, "mdl": 1}
    assert dict(model_on_eight.partitioner.mesh.shape) == {"replica": 1, "data": 4, "mdl": 2}
    for item in (model, model_on_eight):
        weights = item.weights
        assert weights.keys() == wanted.keys()
        for path, x in weights.items():
            np.testing.assert_array_equal(x, wanted[path].read(), err_msg=path)
    (hidden,) = [x for path, x in model.weights.items() if path.endswith("ffn_layer1/linear/w")]
    assert hidden.shape == (2, 7, 11)  # Stored as [2, 8, 12] by the mesh that trained it.


def test_evaluate_gives_the_numbers_of_mode_eval(job, model, model_on_eight):
    before = files_of(job)
    assert model.evaluate("heldout") == evaluated(job)
    # The line before was written in training, on eight devices.
    assert model_on_eight.evaluate("heldout") == evaluated(job, line=-2)
    assert files_of(job) == before


def test_evaluate_takes_batches_of_any_numbers_of_rows(job, model, model_on_eight):
    expected = evaluated(job)
    rows = {}
    for batch in model.job.datasets["heldout"].batches():
        for name, x in batch.items():
            rows[name] = np.concatenate([rows.get(name, x[:0]), x])
    batches = [
        {n: x[start : start + 7] for n, x in rows.items()}
        for start in range(0, len(rows["ids"]), 7)
    ]
    assert len({len(batch["ids"]) for batch in batches}) == 2, "the last is not shorter"
    for actual in (model_on_eight.evaluate(batches), model_on_eight.evaluate(rows)):
        for name, value in actual.items():
            assert value == pytest.approx(expected[name], abs=1e-5), name


def test_samples_are_drawn_anew_for_the_checkpoint_of_another_step(model):
    of_another_step = copy.copy(model)
    of_another_step.step = 3
    records, again = (model.decode("prompts", temperature=1.5) for _ in range(2))
    assert records == again != of_another_step.decode("prompts", temperature=1.5)


def test_predict_is_the_models_own_call(model, model_on_eight):
    ids = np.random.default_rng(0).integers(0, 257, (5, 13))  # int64, and no device has as many.
    mdl_vars = {"params": {}, "non_trainable": {}}
    for path, x in model.weights.items():
        *parents, name = path.split("/")
        node = mdl_vars
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = x
    module = model.partitioner.task.model.module(mdl_vars)
    expected = module(np.asarray(ids, np.int32))[0]
    for item in (model, model_on_eight):
        logits, cache = item.predict(ids)
        assert isinstance(logits, np.ndarray) and logits.shape == (5, 13, 257) and cache is None
        np.testing.assert_allclose(logits, expected, atol=1e-5)
    hidden = model.predict(ids, paddings=np.zeros((5, 13), np.float32))[0]
    np.testing.assert_allclose(hidden, expected, atol=1e-5)


def test_a_second_call_rebuilds_no_model_and_compiles_no_program(job, monkeypatch, caplog):
    model = loaded(job)
    batch = next(iter(model.job.datasets["heldout"].batches()))
    calls = {
        "plain": lambda: model.generate("The "),
        "a setting": lambda: model.generate("The ", max_decode_steps=4),
        "another seed": lambda: model.generate("The ", decoder=Sample(max_decode_steps=3), seed=1),
        "a list": lambda: model.generate("The ", stop_strings=["e"], eos_id=[0, 1]),
        "a dataset": lambda: model.decode("prompts", max_decode_steps=4),
        "evaluate": lambda: model.evaluate(batch),
        "predict": lambda: model.predict(batch["ids"]),
    }
    expected = {name: repr(call()) for name, call in calls.items()}

    def refuse(*args, **kwargs):
        raise AssertionError("built again")

    monkeypatch.setattr(NnxModel, "_built", refuse)
    monkeypatch.setattr(Partitioner, "__init__", refuse)
    caplog.clear()
    with jax.log_compiles():
        assert {name: repr(call()) for name, call in calls.items()} == expected
    compiled = [x.getMessage() for x in caplog.records if "Compiling" in x.getMessage()]
    assert not [line for line in compiled if "_step" in line or "forward" in line], compiled


def without_scores(records):
    return [{k: v for k, v in item.items() if k not in ("log_prob", "score")} for item in records]


def test_decode_and_generate_give_the_records_of_mode_decode(job, model, model_on_eight):
    expected, before = decoded(job), files_of(job)
    assert model.decode("prompts") == expected
    texts = [record["prompt"] for record in expected]
    ids = [[256, *text.encode()] for text in texts]
    for actual in (model.generate(texts), model_on_eight.generate(texts), model.generate(ids)):
        assert without_scores(actual) == without_scores(expected)
        for item, other in zip(actual, expected, strict=True):
            assert item["log_prob"] == pytest.approx(other["log_prob"], abs=1e-4)
    assert without_scores(model.generate(texts[0])) == without_scores(expected[:1])
    assert files_of(job) == before


def test_settings_of_the_decoder_are_those_of_the_command_line(job, model, tmp_path):
    texts, own = [record["prompt"] for record in decoded(job)], copy_of_trained(tmp_path / "job")
    succeed(
        "--mode=decode",
        f"--job_log_dir={own.path}",
        "--set",
        ONE_DEVICE,
        "run.seed=7",
        "task.decoder.temperature=1.5",
        "task.decoder.num_samples=2",
    )
    expected = decoded(own)
    actual = model.generate(texts, temperature=1.5, num_samples=2, seed=7)
    assert without_scores(actual) == without_scores(expected) and len(actual) == 6
    with pytest.raises(ConfigError, match=r"weights_dtype is 'int4'; expected one of activ"):
        model.generate(texts, weights_dtype="int4")
    stopped = model.generate(texts, decoder=Greedy(max_decode_steps=2))
    assert {item["decode_length"] for item in stopped} <= {1, 2}
    rounded = model.generate(texts, seed=7, weights_dtype="int8")
    exact = model.generate(texts, seed=7)
    assert 0 < abs(rounded[0]["log_prob"] - exact[0]["log_prob"]) < 0.5
    # The job's decoder is as it was.
    assert {element["decode_length"] for element in model.generate(texts)} & {3, 4, 5}


# Each call names what was given, and the argument.
REFUSED_CALLS = [
    (lambda m: m.evaluate("held"), "'held'.*heldout"),
    (lambda m: m.evaluate("train"), r"datasets\.train .*run\.evaluation\.max_batches"),
    (lambda m: m.evaluate({"ids": np.ones((2, 3))}), "'labels'"),
    (lambda m: m.evaluate([]), "evaluate.* no batches"),
    (lambda m: m.evaluate(np.ones((2, 3))), "evaluate.*ndarray;.*NumPy"),
    (lambda m: m.evaluate([{"ids": np.ones((2, 3))}, {"id": np.ones((2, 3))}]), r"\['id'\]"),
    (lambda m: m.evaluate([{"ids": np.ones((2, 3))}, {"ids": np.ones((2, 4))}]), " 3 .* 4"),
    (lambda m: m.decode("heldout"), r"decode_datasets.*\['prompts'\]"),
    (lambda m: m.predict(), r"predict.* \(\),"),
    (lambda m: m.predict([[1, 2]]), r"predict.*\[\[1, 2\]\]"),
    (lambda m: m.generate([]), r"generate.* \[\];"),
    (lambda m: m.generate([[]]), r"generate.*\[\[\]\];"),
    (lambda m: m.generate([[[1]]]), r"int64\[1, 1\]"),
    (lambda m: m.generate([[1, 10**6]]), r"prompt.*1000000.*\[1\]"),
    (lambda m: m.generate([[-1]]), "prompt.*-1"),
    (lambda m: m.generate([[1.7]]), r"float64\[1\]"),
    (lambda m: m.generate([[True]]), r"bool\[1\]"),
    (lambda m: m.generate([[2**40]]), "prompt.*1099511627776"),
    (lambda m: m.generate([[[1], [1, 2]]]), r"\[\[1\], \[1, 2\]\]"),
    (lambda m: m.generate([3, 4]), r"int64\[\]"),
    (lambda m: m.generate(b"a"), "generate.*b'a';"),
    (lambda m: m.generate({"a": 1}), r'generate.*\{"a": 1\};.*"prompt".*"messages"'),
    (lambda m: m.generate(None), "generate.*None;"),
    (lambda m: m.generate("a", eos_id=10**6), "eos_id.* 1000000;.*256"),
    (lambda m: m.generate("a", eos_id=(1, 10**6)), "eos_id.*.1.*1000000"),
    (lambda m: m.generate("a", eos_id=True), "eos_id.*True"),
    (lambda m: m.generate("a", seed=-1), "seed.*-1.*0"),
    (lambda m: m.generate("a", seed=1.0), "seed.*1.0"),
    (lambda m: m.generate("a", max_decode_steps=2.0), "max_decode_steps.*2.0"),
    (lambda m: m.generate("a", max_decode_steps=True), "max_decode_steps.*True"),
    (lambda m: m.generate("a", temperature="hot"), "temperature.*'hot'"),
    (lambda m: m.generate("a", k=1.5), r"Sample\.k.* 1\.5;"),
    (lambda m: m.generate("a", k=None), r"Sample\.k.*None"),
    (lambda m: m.predict(np.array([[10**6]])), "predict.*ids.*1000000"),
    (lambda m: m.predict(np.array([[-1]])), "predict.*ids.*-1"),
    (lambda m: m.predict(np.array([[1.7]])), r"predict.*ids.*float64\[1, 1\]"),
    (lambda m: m.predict(ids=np.array([[-1]])), "predict.*ids.*-1"),
    (lambda m: m.generate("a", temprature=1), "'temprature'.*temp"),
    (lambda m: m.generate("a", decoder=BeamSearch(), k=3), "BeamSearch.*'k'"),
]


def test_a_wrong_argument_is_named_with_its_value(model):
    def check(case):
        call, words = case
        with pytest.raises(ConfigError, match=words):
            call(model)

    assert_each(check, ((case[1], case) for case in REFUSED_CALLS))


REFUSED_JOBS = [
    ({"step": 5}, "5.*3.*6.*7"),
    ({"step": "last"}, "'best'.*None"),
    ({"mesh": "eight"}, "'attached'.*'job'.*MeshConfig"),
    ({"mesh": MeshConfig(ici_mesh_shape=(1, 16, 1))}, "16.*8"),
    ({"settings": ["run.evaluation.use_ema_states=True"]}, "ema_decay"),
    ({"settings": ["task.decoder.temprature=1"]}, r"\.temprature.*\.temperature"),
]


def test_a_job_that_is_not_as_wanted_is_refused(job):
    def check(case):
        settings, words = case
        with pytest.raises(ConfigError, match=words):
            loaded(job, **settings)

    assert_each(check, ((case[1], case) for case in REFUSED_JOBS))


def test_where_no_job_is_is_said(tmp_path):
    with pytest.raises(ConfigError, match="job_log_dir=.*Train the job first"):
        praxis_lite.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="config.json"):
        praxis_lite.load(tmp_path)


def test_data_that_are_elsewhere_do_not_keep_the_weights_from_being_used(job):
    model = loaded(job, step=3, settings=["datasets.train.corpus.files=/nowhere/*"])
    assert model.step == 3 and model.weights
    with pytest.raises(ConfigError, match="/nowhere"):
        model.evaluate("heldout")
