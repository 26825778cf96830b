"""Mistakes in a new user's package: one paragraph, or the line of their code; all in process."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.job_runs import home, launch
from tests.support.marks import slow_but
from tests.test_main import refused

EXPERIMENTS = Path(__file__).with_name("mistaken_experiments.py")


@pytest.fixture(autouse=True, scope="module")
def package():
    folder = home() / "mistakes"
    if not folder.exists():
        folder.mkdir()
        (folder / "__init__.py").touch()
        shutil.copy(EXPERIMENTS, folder / "all.py")
        begin = "from mistakes.all import *\n"
        ends = "\n@register\nclass One(Fine):\n    'A mistake.'\n"
        for name, mistake in {
            "syntax": "def task(self)\n    pass",
            "absent": "import torchvison",
            "misnamed": "from praxis_lite import registr",
            "undefined": "WIDTH = widht + 1",
        }.items():
            (folder / f"{name}.py").write_text(begin + mistake + ends)


def run(name, job, *settings):
    argv = ["--packages=mistakes", f"--exp=mistakes.{name}", f"--job_log_dir={job}"]
    return [*argv, *(["--set", *settings] if settings else [])]


PAIRS = r'expected a pair \(value, weight\) of scalars .* return \{"loss": \(loss, weight\)\}'
# The found and the expected values in the message.
REFUSED = {
    "NoPairs": rf"Returns.compute_loss returns float32\[\] as 'loss'; {PAIRS}",
    "Scalar": rf"compute_loss returns float32\[\]; {PAIRS}",
    "AuxSecond": rf"returns a tuple of \(float32\[\], a dict\); {PAIRS}",
    "NoLoss": rf"returns \['mse'\] without 'loss'; {PAIRS}",
    "Nothing": rf"compute_loss returns None; {PAIRS}",
    "Vector": rf"a tuple of \(float32\[13\], a float\) as 'loss'; {PAIRS}",
    "WeightPerRow": rf"a tuple of \(float32\[\], float32\[13\]\) as 'loss'; {PAIRS}",
    "Count": r"returns int32\[\] as the loss, which has no gradient; expected a float",
    "LossOfTwo": r"called with \(model, inputs, key\), but .*has the signature \(model, inputs\)",
    "BuiltOptimizer": r"is already built.* Write fdl.Partial\(optax.adamw, .*function of learning",
    "NoDecayMethod": r"'decay_method'. Set it .*: fdl.Partial\(adafactor, decay_method=...\)",
    "NoRate": "scale_by_adam cannot be called with only learning_rate: got an unexpected keyword",
    "NamedOptimizer": r"is 'adamw'; expected a function .* such as fdl.Partial\(optax.adamw",
    "NoOptimizer": "returns_rate returns a float; expected an optax.GradientTransformation",
    "NamedRate": "learning_rate is '1e-3'; expected a number, or a schedule",
    "UnbuiltSchedule": r"use fdl.Config\(linear_schedule, ...\)",
    "PartialLearner": r"LossTask.learner is a partial; expected a Learner: fdl.Config\(Learner",
    "ConfigModel": r"task.model: Mlp cannot be built: .*'rngs'.* use fdl.Partial\(Mlp, ...\)",
    "NoWidth": r"Mlp requires width. Set it in the config, such as fdl.Partial\(Mlp, width=...\)",
    "Misspelled": "Mlp has no setting 'widht'; it has width. Did you mean width",
    "Twice": r"Mlp: .* passes width by position and by name.* fdl.Partial\(Mlp, width=...\)",
    "BuiltModel": r"model is an instance of Identity; expected a function .* fdl.Partial\(Ident",
    "AbstractTask": "task: NoComputeLoss cannot be built: .*abstract.*compute_loss",
    "AbstractPipeline": "datasets.train: L.*batches.*element_spec.*fingerprint.*num_batches",
    "Empty": r"no methods mesh\(\), task\(\), datasets\(\), run\(\). Add.*def mesh",
    "MeshTuple": r"mesh\(\) returns a tuple; expected .* such as fdl.Config\(MeshConfig",
    "ListOfArrays": "InMemory.arrays is <class 'list'>; .*a dict of arrays keyed by name",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_user_can_mend_is_one_paragraph_before_anything_compiles(name, tmp_path):
    message = refused(*run(f"all.{name}", tmp_path))
    assert re.search(REFUSED[name], message), message


# The user's line, and what was wrong with it.
THEIR_LINES = {
    "all.Shape": (
        "mistakes/all.py",
        "return (self.a(x) @ jnp.ones((9, 1)))[:, 0]",
        "in __call__",
        "TypeError: dot_general requires",
    ),
    "all.LayerTuple": (
        "mistakes/all.py",
        'return jnp.square(model(inputs["x"]) - inputs["y"])',
        "in loss",
        "'tuple'",
    ),
    "all.PaxMapping": (
        "mistakes/all.py",
        'task.model.weight_split_dims_mapping.wt = ("data", "mdl")',
        "in task",
        "mapping has no fields: assign a sequence",
    ),
    "syntax.One": ("mistakes/syntax.py", "def task(self)", "line 2", "SyntaxError: expected ':'"),
    "absent.One": ("mistakes/absent.py", "import torchvison", "line 2", "ModuleNotFoundError"),
    "misnamed.One": ("mistakes/misnamed.py", "import registr", "line 2", "ImportError: cannot"),
    "undefined.One": ("mistakes/undefined.py", "WIDTH = widht + 1", "line 2", "NameError: name"),
}


@pytest.mark.parametrize("name", slow_but(THEIR_LINES.keys() - {"all.Shape"}, THEIR_LINES))
def test_an_exception_of_the_users_code_is_their_line_and_its_traceback_a_file(name, tmp_path):
    job = tmp_path / "job"
    done = launch(*run(name, job))
    assert (done.code, done.num_compiled) == (1, 0)
    assert "Traceback" not in done.err and len(done.err.splitlines()) <= 6
    message = " ".join(done.err.split())
    file, line, *words = THEIR_LINES[name]
    assert message.startswith("error: ") and f"{file}, line" in message.split("`")[0]
    assert f"`{line}" in message or f"{line}`" in message
    assert all(word in message for word in words)
    path = re.search(r"The full traceback is in (\S+)\.$", message)[1]
    # Of a job only once its directory is known to be its own.
    assert (path == str(job / "traceback.txt")) == job.exists()
    with open(path) as traceback:
        text = traceback.read()
    assert text.startswith("Traceback (most recent call last)") and file in text
    # The mended experiment may take the directory.
    if name == "all.Shape":
        assert launch(*run("all.Fine", job)).code == 0


OTHER_BATCHES = {
    "shape": r"'x' is float32\[13, 7\], .*float32\[13, 5\]",
    "dtype": r"'x' is int32\[13, 5\], .*float32\[13, 5\]",
    "names": r"has the leaves \['x'\]; .*\['x', 'y'\]",
    "list": r"is a list; .*a dict of arrays: \['x', 'y'\]",
    "none": "is None; .*a dict of arrays",
    "ended": r"ended after 2 batches \(num_batches is None\), but training needs more",
}


@pytest.mark.parametrize("what", OTHER_BATCHES)
def test_a_batch_that_is_not_as_promised_is_named_at_its_step(what, tmp_path):
    done = launch(*run("all.Fine", tmp_path, f"datasets.train.what={what}"))
    message = " ".join(done.err.split())
    assert done.code == 2 and "Traceback" not in message
    assert re.search(OTHER_BATCHES[what], message), message
    assert "error: datasets.train" in message
    assert what == "ended" or "batch 2 (counted from 0)" in message
    assert "step 1/3" in done.out


def test_the_first_batch_of_an_evaluation_is_looked_at_before_training(tmp_path):
    done = launch(*run("all.BadHeldout", tmp_path))
    assert done.code == 2 and "compiling" not in done.out
    assert "datasets.heldout: batch 0 (counted from 0) has wrong shapes" in done.err


@pytest.mark.slow
def test_a_nan_in_the_data_of_an_evaluation_is_named(tmp_path):
    done = launch(*run("all.BadHeldout", tmp_path, "datasets.heldout.what=nan"))
    assert done.code == 3, done.err
    assert "datasets.heldout: batch 0 (counted from 0) has NaN in 'y', rows 3, 7" in done.out


def test_a_pipeline_that_raises_is_the_users_line(tmp_path):
    done = launch(*run("all.Fine", tmp_path, "datasets.train.what=raises"))
    message = " ".join(done.err.split())
    assert done.code == 1 and '`raise LookupError("no such record")`' in message
    assert f"in {tmp_path}/traceback.txt" in message


@pytest.mark.parametrize("in_a_row", ["1", "100"])
def test_a_nan_in_the_data_is_named_by_batch_and_rows(in_a_row, tmp_path):
    settings = ["datasets.train.what=nan", f"run.stopping.max_skipped_steps_in_a_row={in_a_row}"]
    done = launch(*run("all.Fine", tmp_path, *settings))
    words = "datasets.train: batch 2 (counted from 0) has NaN in 'y', rows 3, 7"
    assert words in done.out
    # Where the run ends for it, that is what it says.
    assert (f"{words}: fix the data" in " ".join(done.err.split())) == (in_a_row == "1")


def test_options_that_there_are_not_are_told_the_nearest():
    for argv, words in {
        ("--job_dir=x",): "--job_log_dir?",
        ("run.seed=3",): "--set run.seed=3",
        ("--run.seed=3",): "--set run.seed=3",
        ("--mode=test",): "no subcommand test. `praxis --help`",
        ("--mode=eval", "--step=last"): "'last'",
    }.items():
        assert words in refused(*argv)


def test_a_directory_that_is_none_is_refused(tmp_path):
    assert "--job_log_dir " in refused(*run("all.Fine", ""))
    long = tmp_path / ("x" * 300)
    assert "(File name too long)" in refused(*run("all.Fine", long))
    (tmp_path / "config.json").mkdir()
    assert "config.json" in refused(*run("all.Fine", tmp_path))
