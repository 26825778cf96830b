"""train, explain, plan and check in Python: they do what the command line does."""

import contextlib
import io
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
from unittest import mock

import fiddle as fdl
import jax
import numpy as np
import pytest

import praxis_lite as pl
from praxis_lite import ConfigError
from praxis_lite.config.config_json import load_config_file
from praxis_lite.job.job_dir import JobDir
from tests.support import line_jobs
from tests.support.job_runs import (
    CHECKOUT,
    home,
    launch,
    lines_of,
    loaded,
    start_process,
    succeed,
    trained,
)

pytestmark = pytest.mark.slow

TINY = "jobzoo.experiments.Tiny"
PACKAGES = ["jobzoo"]
LINE = line_jobs.LINE.removeprefix("--exp=")


@contextlib.contextmanager
def as_launched():
    """Sets the environment as `launch` of job_runs does: a cache folder, and eight devices."""
    env = {"XDG_CACHE_HOME": str(home() / "cache"), "JAX_NUM_CPU_DEVICES": "8"}
    out = io.StringIO()
    with mock.patch.dict(os.environ, env), contextlib.redirect_stdout(out):
        yield out


def train(folder, **settings):
    with as_launched():
        return pl.train(TINY, folder, packages=PACKAGES, **settings)


def train_line(folder, settings=("run.num_train_steps=7",), **others):
    with as_launched():
        return pl.train(LINE, folder, packages=PACKAGES, settings=settings, **others)


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """A line, trained without a stop."""
    return train_line(tmp_path_factory.mktemp("line"))


class Counts(pl.Hook):
    """Notes the steps that it is told of."""

    def __init__(self):
        self.steps, self.losses, self.trained = [], [], None

    def after_step(self, made):
        self.steps.append(made.step)

    def after_metrics(self, metrics):
        self.losses.append(metrics.line["loss"])

    def after_training(self, step):
        self.trained = step


@pytest.fixture(scope="module")
def hook():
    return Counts()


@pytest.fixture(scope="module")
def model(tmp_path_factory, hook):
    """Tiny trained in Python, with a hook and settings that are its own."""
    settings = {"run.num_train_steps": 7, "mesh.ici_mesh_shape": (1, 4, 2)}
    return train(tmp_path_factory.mktemp("python") / "job", settings=settings, hooks=[hook])


def without_tokens(lines):
    return [{k: v for k, v in x.items() if k != "tokens_per_second"} for x in lines]


def test_the_losses_are_those_of_the_command_line_bit_for_bit(model, hook):
    files, expected = JobDir(model.job_dir), trained()[0]
    lines = lines_of(files.metrics_jsonl)
    assert without_tokens(lines) == without_tokens(lines_of(expected.metrics_jsonl))
    assert lines_of(files.eval_metrics_jsonl) == lines_of(expected.eval_metrics_jsonl)
    assert hook.steps == list(range(1, 8)) and hook.trained == 7
    assert hook.losses == [line["loss"] for line in lines]
    assert "Counts" not in files.config_json.read_text()


def test_its_config_is_that_of_the_same_settings_as_texts(model):
    expected = load_config_file(trained()[0].config_json, packages=PACKAGES)
    actual = load_config_file(JobDir(model.job_dir).config_json, packages=PACKAGES)
    assert actual.config == expected.config and actual.experiment == TINY
    assert actual.overrides == ("run.num_train_steps=7", "mesh.ici_mesh_shape=1,4,2")


def test_metrics_and_evaluations_are_columns_of_the_files(model):
    files = JobDir(model.job_dir)
    by_hand = [json.loads(text) for text in files.metrics_jsonl.read_text().splitlines()]
    assert model.metrics.keys() == set().union(*by_hand)
    for name, column in model.metrics.items():
        expected = [line.get(name, np.nan) for line in by_hand]
        np.testing.assert_array_equal(column, expected, err_msg=name)
    assert model.metrics["step"].tolist() == list(range(1, 8))
    evaluated = [json.loads(text) for text in files.eval_metrics_jsonl.read_text().splitlines()]
    heldout = model.evaluations["heldout"]
    assert heldout["step"].tolist() == [line["step"] for line in evaluated] == [3, 6, 7]
    assert heldout["loss"].tolist() == [line["loss"] for line in evaluated]
    table = pytest.importorskip("pandas").DataFrame(model.metrics)
    assert table["loss"].tolist() == model.metrics["loss"].tolist()


def test_it_is_what_load_returns(model):
    of_load = loaded(JobDir(model.job_dir), mesh="job")
    assert type(model) is type(of_load) and model.step == of_load.step == 7
    assert model.stopped_by is of_load.stopped_by is None
    for path, x in of_load.weights.items():
        np.testing.assert_array_equal(model.weights[path], x, err_msg=path)
    assert model.evaluate("heldout") == of_load.evaluate("heldout")
    assert model.generate("7 plus ") == of_load.generate("7 plus ")


def test_a_pickled_model_has_the_models_weights_mesh_and_step(model):
    copy = pickle.loads(pickle.dumps(model))
    assert (copy.step, copy.experiment, copy.job_dir) == (7, model.experiment, model.job_dir)
    assert copy.partitioner.mesh == model.partitioner.mesh
    for path, weight in model.weights.items():
        np.testing.assert_array_equal(copy.weights[path], weight)


def test_it_is_shown_by_its_curve_and_its_last_numbers(model):
    last = model.metrics["loss"][-1]
    assert f"{TINY}, step 7, loss {last:.4f}, heldout loss" in repr(model)
    html = model._repr_html_()
    assert f"loss {last:.4g}" in html and html.count("<polyline") == 2
    assert html.count("<circle") == 3


def test_the_same_job_goes_on_on_another_mesh_in_the_same_process(tmp_path, line):
    train_line(tmp_path, {"run.num_train_steps": 4})
    settings = ["run.num_train_steps=7", "mesh.ici_mesh_shape=1,2,3"]
    model = train_line(tmp_path, settings)
    assert model.metrics["step"].tolist() == list(range(1, 8))
    assert dict(model.partitioner.mesh.shape) == {"replica": 1, "data": 2, "mdl": 3}
    np.testing.assert_allclose(model.metrics["loss"], line.metrics["loss"], rtol=1e-5)
    # And there is nothing left to train.
    assert train_line(tmp_path, settings).step == 7


def test_a_mesh_larger_than_jax_started_with_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    assert jax.device_count() == 8
    words = r"needs 16 devices, but there are 8 .*restart Python .*simulate_devices\(16\)"
    with pytest.raises(ConfigError, match=words):
        pl.train(TINY, tmp_path, packages=PACKAGES, settings={"mesh.ici_mesh_shape": (1, 16, 1)})


def test_an_exception_of_the_users_comes_through_and_nothing_stays_locked(
    tmp_path, monkeypatch, line
):
    monkeypatch.setenv("LINES_RAISE_AT", "4")
    with pytest.raises(RuntimeError, match="^the plug was pulled$"):
        train_line(tmp_path)
    monkeypatch.delenv("LINES_RAISE_AT")

    class Refuses(pl.Hook):
        def before_training(self, loop, state):
            raise LookupError("not today")

    with pytest.raises(LookupError, match="^'?not today"):
        train_line(tmp_path, hooks=[Refuses()])
    assert train_line(tmp_path).metrics["loss"].tolist() == line.metrics["loss"].tolist()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"settings": {"run.num_train_stepz": 7}}, "run.num_train_steps"),
        (
            {"settings": {"run.num_train_steps": "many"}},
            "num_train_steps: found 'many', expected int",
        ),
        ({"settings": {"run.num_train_steps": 1.5}}, "found '1.5', expected int"),
        ({"settings": "run.seed=1"}, "settings is 'run.seed=1'"),
        ({"hooks": [print]}, r"hooks\[0\] is <built-in function print>; expected a Hook"),
        ({"packages": "jobzoo"}, "packages is 'jobzoo'; expected a list"),
    ],
)
def test_what_is_wrong_is_a_config_error_at_once(tmp_path, arguments, words):
    with as_launched(), pytest.raises(ConfigError, match=words):
        pl.train(TINY, tmp_path, **{"packages": PACKAGES, **arguments})
    assert not JobDir(tmp_path).checkpoints.exists()


@pytest.mark.parametrize(
    "experiment, words",
    [
        ("lm.PyDoc", "lm.PyDocs"),
        (pl.Experiment(), "the class, not an instance"),
        (int, "expected a subclass of Experiment"),
        (type("Local", (pl.Experiment,), {"__qualname__": "test.<locals>.Local"}), "top level"),
    ],
)
def test_an_experiment_that_is_none_is_told(tmp_path, experiment, words):
    with pytest.raises(ConfigError, match=words):
        pl.train(experiment, tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_an_error_of_a_constructor_is_the_very_exception():
    from jobzoo.experiments import Tiny

    class Odd(ValueError):
        pass

    raised = Odd("no such width")

    def corpus():
        raise raised

    datasets = {"train": fdl.Config(corpus)}
    with mock.patch.object(Tiny, "datasets", lambda self: datasets), pytest.raises(Odd) as error:
        pl.explain(TINY, packages=PACKAGES)
    assert error.value is raised


def test_in_another_thread_it_trains_and_says_that_no_signal_is_heard(tmp_path, line):
    result = []
    with as_launched():
        settings = {"run.num_train_steps": 7}
        thread = threading.Thread(
            target=lambda: result.append(
                pl.train(LINE, tmp_path, packages=PACKAGES, settings=settings)
            )
        )
        thread.start()
        thread.join()
    assert result[0].metrics["loss"].tolist() == line.metrics["loss"].tolist()
    assert "not in the main thread" in (tmp_path / "log.txt").read_text().splitlines()[0]


class Interrupts(pl.Hook):
    """Presses Ctrl-C in a step; at 0 before the first."""

    def __init__(self, step):
        self.step = step

    def before_training(self, loop, state):
        if self.step == 0:
            signal.raise_signal(signal.SIGINT)

    def after_step(self, made):
        if made.step == self.step:
            signal.raise_signal(signal.SIGINT)


class Ends(pl.Hook):
    """Ends training at step 2, with a reason."""

    def after_step(self, made):
        return "bored" if made.step == 2 else None


def test_the_reason_of_a_hook_that_ends_training_is_what_stopped_it(tmp_path, line):
    model = train_line(tmp_path, hooks=[Ends()])
    assert (model.stopped_by, model.step) == ("bored", 2)


def test_an_interrupt_saves_the_step_and_is_raised(tmp_path, line):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # There is nothing to save.
            train_line(tmp_path, hooks=[Interrupts(0)])
        with pytest.raises(KeyboardInterrupt, match="SIGINT: step 5 is saved"):
            train_line(tmp_path, hooks=[Interrupts(4)])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    model = train_line(tmp_path)
    assert (model.stopped_by, model.step) == (None, 7)
    assert model.metrics["loss"].tolist() == line.metrics["loss"].tolist()


def of_today(text):
    """Returns a text without the seconds of compiling."""
    seconds = re.findall(r"compiled\W+in (\d+) s", text)
    assert all(int(x) < 600 for x in seconds)
    return re.sub(r"(compiled\W+)in \d+ s", r"\1", text)


def test_explain_is_what_the_mode_prints_and_its_page(tmp_path):
    with as_launched():
        explanation = pl.explain(LINE, packages=PACKAGES)
    page = tmp_path / "explain.html"
    out = succeed("--mode=explain", f"--exp={LINE}", f"--html={page}").out
    text = out.split(" there is no accelerator\n")[1].split("\n\nOpen this page in a browser")[0]
    assert of_today(str(explanation)) == of_today(text)
    assert of_today(explanation.page()) == of_today(page.read_text("utf-8"))
    assert "<iframe srcdoc=" in explanation._repr_html_()
    assert [step.dataset for step in explanation.steps] == ["train"]
    assert explanation.steps[0].flops > 0 and explanation.layout.leaves()


def test_plan_is_what_the_mode_prints_and_its_files(tmp_path):
    with as_launched():
        plan = pl.plan(TINY, topology="cpu:8", steps=["train", "eval"], packages=PACKAGES)
    file = tmp_path / "plan.json"
    out = succeed(
        "--mode=plan", f"--exp={TINY}", "--topology=cpu:8", "--steps=train,eval", f"--json={file}"
    ).out
    assert of_today(str(plan)) == of_today(out.partition("\n")[2].rstrip("\n"))
    record, expected = json.loads(plan.json_text()), json.loads(file.read_text())
    for item in (record, expected, *record["other_steps"], *expected["other_steps"]):
        del item["compile_seconds"]
    assert record == expected
    assert plan.fits and [step.step for step in plan.steps] == ["train", "eval"]
    assert "<iframe" in plan._repr_html_()


def test_a_plan_that_does_not_fit_is_no_error_in_python():
    settings = {"task.model.model_dims": 2**14, "task.model.vocab_size": 2**20}
    with as_launched():
        plan = pl.plan("lm.Synthetic", topology="cpu:8", settings=settings)
    assert not plan.fits and plan.steps[0].why_not
    with pytest.raises(ConfigError, match="does not fit on cpu:8"):
        plan.require_fit()


def test_check_is_what_the_mode_prints_and_its_file(tmp_path):
    meshes, file = [(1, 2, 1)], tmp_path / "certificate.json"
    with as_launched():
        certificate = pl.check(LINE, meshes=meshes, steps=1, packages=PACKAGES)
    done = launch("--mode=check", f"--exp={LINE}", "--meshes=1x2x1", "--steps=1", f"--json={file}")
    assert done.code == int(not certificate.certified) == 0
    assert done.out.endswith(f"\n\n{certificate}\n")
    assert certificate.json_text() == file.read_text()
    assert certificate._repr_html_().count("<tr>") == len(certificate.rows()) + 1


NOTEBOOK = """
import fiddle as fdl, jax, numpy as np, optax
from flax import nnx
import praxis_lite as pl
from praxis_lite.core import Learner
from praxis_lite.inputs import InMemory
from praxis_lite.tasks.loss import LossTask

class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.layer = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)[:, 0]

def squared_error(model, inputs, key):
    return (model(inputs["x"]) - inputs["y"]) ** 2

def points():
    x = np.random.default_rng(0).normal(size=(37, 2)).astype(np.float32)
    return {"x": x, "y": x[:, 0] - x[:, 1]}

class Line(pl.Experiment):
    def mesh(self):
        return fdl.Config(pl.MeshConfig, ici_mesh_shape=(2,), axis_names=("data",))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.sgd), learning_rate=0.1)
        return fdl.Config(LossTask, model=fdl.Partial(Net), loss=squared_error, learner=learner)

    def datasets(self):
        return {"train": fdl.Config(InMemory, points, batch_size=7, shuffle=True)}

    def run(self):
        return fdl.Config(pl.RunConfig, num_train_steps=3)
"""


def test_classes_of_a_notebook_survive_in_it_and_elsewhere_it_is_said_what_to_do(tmp_path):
    def run(source):
        done = subprocess.run(
            [sys.executable, "-c", source],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(home() / "cache")},
        )
        return done.stdout + done.stderr.strip().rpartition("\n")[2]

    again = NOTEBOOK.partition("class Line")[2]  # A cell that runs again defines its class again.
    loads = f"print(pl.load({str(tmp_path)!r}).weights['params/layer/kernel'].tolist())\n"
    trains = f"print(pl.train(Line, {str(tmp_path)!r}).weights['params/layer/kernel'].tolist())\n"
    out = run(f"{NOTEBOOK}{trains}class Line{again}{trains}{loads}").splitlines()
    weights = [line for line in out if line.startswith("[[")]
    assert len(weights) == 3 and len(set(weights)) == 1
    # A process without the classes is told what to do, and then it can load the job.
    refused = f"try:\n    {loads}except pl.ConfigError as error:\n    print(error)\n"
    out = run(f"import praxis_lite as pl\n{refused}{NOTEBOOK}{loads}")
    assert "__main__.Net" in out and "Run the cell" in out
    assert out.splitlines()[-1] == weights[0]
    # In a process of its own: a worker of pytest-xdist has no file, and so looks like a notebook.
    elsewhere = start_process("--mode=eval", f"--job_log_dir={tmp_path}", cwd=tmp_path)
    err = " ".join(elsewhere.communicate()[1].split())
    assert elsewhere.returncode == 2 and "__main__.Net" in err
    assert "in a module of your package" in err
    assert shlex.split(JobDir(tmp_path).config_txt.read_text())  # Its names are written, too.


def test_the_import_costs_no_import_of_jax():
    source = "import sys, praxis_lite; dir(praxis_lite); print('jax' in sys.modules)"
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.stdout == "False\n"
