"""Mistakes in a new user's package: one paragraph, or the line of their code; all in process."""

import re

import pytest

from tests.support.job_runs import home, launch
from tests.test_main import refused

# Each class below is a mistake; `Fine` is what they vary.
EXPERIMENTS = '''
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite import Experiment, MeshConfig, RunConfig, register
from praxis_lite.inputs import InMemory
from praxis_lite.inputs.base import IndexedPipeline, InputPipeline, spec_of
from praxis_lite.learner.learner import Learner
from praxis_lite.learner.optimizers import adafactor
from praxis_lite.task import Task
from praxis_lite.tasks.loss import LossTask


class Mlp(nnx.Module):
    def __init__(self, width, rngs):
        self.a = nnx.Linear(5, width, rngs=rngs)

    def __call__(self, x):
        return self.a(x)[:, 0]


class Identity(nnx.Module):
    def __call__(self, x):
        return x[:, 0]


class WrongShape(Mlp):
    def __call__(self, x):
        return (self.a(x) @ jnp.ones((9, 1)))[:, 0]


class ReturnsTuple(Mlp):
    def __call__(self, x):
        return super().__call__(x), None


class Batches(IndexedPipeline):
    """Batches that are `what` from the third on."""

    def __init__(self, batch_size, what="good"):
        self.batch_size, self.what = batch_size, what

    @property
    def num_batches(self):
        return None

    def element_spec(self):
        return spec_of(x=((self.batch_size, 5), np.float32), y=((self.batch_size,), np.float32))

    def fingerprint(self):
        return {"batch_size": self.batch_size}

    def batches(self, start=0, *, rows=None):
        batches = super().batches(start, rows=rows)
        return (one for _, one in zip(range(2), batches)) if self.what == "ended" else batches

    def rows(self, index, rows):
        x = np.random.default_rng(index).normal(size=(self.batch_size, 5)).astype(np.float32)
        y, what = x.sum(axis=1), self.what if index == 2 else "good"
        if what == "nan":
            y[[3, 7]] = np.nan
        if what == "raises":
            raise LookupError("no such record")
        batch = {"x": x[rows], "y": y[rows]}
        return {
            "shape": {**batch, "x": np.ones((self.batch_size, 7), np.float32)},
            "dtype": {**batch, "x": x.astype(np.int32)},
            "names": {"x": x[rows]},
            "list": [x, y],
            "none": None,
        }.get(what, batch)


def loss(model, inputs, key):
    return jnp.square(model(inputs["x"]) - inputs["y"])


@register
class Fine(Experiment):
    """Nothing is wrong."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 2, 1))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.adam), learning_rate=0.01)
        return fdl.Config(LossTask, fdl.Partial(Mlp, width=7), loss, learner)

    def datasets(self):
        return {"train": fdl.Config(Batches, batch_size=13)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=3)


class OfTask(Task):
    def __init__(self, model, loss, learner):
        super().__init__(model, learner)


def with_loss(returned):
    """Returns a variant of Fine whose compute_loss returns `returned(loss, weights)`."""

    class Returns(OfTask):
        def compute_loss(self, model, inputs, key):
            losses = loss(model, inputs, key)
            return returned(losses.mean(), losses)

    class Variant(Fine):
        def task(self):
            task = super().task()
            fdl.update_callable(task, Returns)
            return task

    return Variant


def with_learner(**settings):
    class Variant(Fine):
        def task(self):
            task = super().task()
            for name, value in settings.items():
                setattr(task.learner, name, value)
            return task

    return Variant


def with_task(**settings):
    class Variant(Fine):
        def task(self):
            task = super().task()
            for name, value in settings.items():
                setattr(task, name, value)
            return task

    return Variant


def named(name, variant):
    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = "A mistake."
    return register(variant)


NoPairs = named("NoPairs", with_loss(lambda mean, losses: {"loss": mean}))
Scalar = named("Scalar", with_loss(lambda mean, losses: mean))
AuxSecond = named("AuxSecond", with_loss(lambda mean, losses: (mean, {"mse": mean})))
NoLoss = named("NoLoss", with_loss(lambda mean, losses: {"mse": (mean, 13.0)}))
Nothing = named("Nothing", with_loss(lambda mean, losses: None))
Vector = named("Vector", with_loss(lambda mean, losses: {"loss": (losses, 13.0)}))
WeightPerRow = named("WeightPerRow", with_loss(lambda mean, losses: {"loss": (mean, losses)}))
Count = named("Count", with_loss(lambda mean, losses: {"loss": (jnp.int32(3), 13.0)}))


def returns_rate(learning_rate):
    return learning_rate


BuiltOptimizer = named("BuiltOptimizer", with_learner(optimizer=optax.adamw(1e-3)))
NoDecayMethod = named("NoDecayMethod", with_learner(optimizer=fdl.Partial(adafactor)))
NoRate = named("NoRate", with_learner(optimizer=fdl.Partial(optax.scale_by_adam)))
NamedOptimizer = named("NamedOptimizer", with_learner(optimizer="adamw"))
NoOptimizer = named("NoOptimizer", with_learner(optimizer=fdl.Partial(returns_rate)))
NamedRate = named("NamedRate", with_learner(learning_rate="1e-3"))
UnbuiltSchedule = named(
    "UnbuiltSchedule",
    with_learner(learning_rate=fdl.Partial(optax.linear_schedule, 1e-3, 1e-4, 10)),
)
PartialLearner = named(
    "PartialLearner",
    with_task(learner=fdl.Partial(Learner, fdl.Partial(optax.adam), learning_rate=0.1)),
)
ConfigModel = named("ConfigModel", with_task(model=fdl.Config(Mlp, width=7)))
NoWidth = named("NoWidth", with_task(model=fdl.Partial(Mlp)))
Misspelled = named("Misspelled", with_task(model=fdl.Partial(Mlp, widht=7)))
Shape = named("Shape", with_task(model=fdl.Partial(WrongShape, width=7)))
LayerTuple = named("LayerTuple", with_task(model=fdl.Partial(ReturnsTuple, width=7)))


@register
class BuiltModel(Fine):
    """A model in place of its config."""

    def task(self):
        task = super().task()
        task.model = Identity()
        return task


class TooFewArguments(OfTask):
    def compute_loss(self, model, inputs):
        return {}


class NoComputeLoss(OfTask):
    pass


@register
class LossOfTwo(Fine):
    """compute_loss without a key."""

    def task(self):
        task = super().task()
        fdl.update_callable(task, TooFewArguments)
        return task


@register
class AbstractTask(LossOfTwo):
    """No compute_loss."""

    def task(self):
        task = super().task()
        fdl.update_callable(task, NoComputeLoss)
        return task


class Lacking(InputPipeline):
    def __init__(self, batch_size):
        self.batch_size = batch_size


@register
class AbstractPipeline(Fine):
    """A pipeline without methods."""

    def datasets(self):
        return {"train": fdl.Config(Lacking, batch_size=13)}


@register
class Empty(Experiment):
    """No methods at all."""


@register
class MeshTuple(Fine):
    """A mesh as Pax's users write it."""

    def mesh(self):
        return (1, 2, 1)


@register
class PaxMapping(Fine):
    """A field below a mapping."""

    def task(self):
        task = super().task()
        task.model.weight_split_dims_mapping.wt = ("data", "mdl")
        return task


def list_of_arrays():
    return [np.ones(3)]


@register
class ListOfArrays(Fine):
    """No names."""

    def datasets(self):
        return {"train": fdl.Config(InMemory, list_of_arrays, batch_size=13, shuffle=True)}


class OnePass(Batches):
    num_batches = 3

    def rows(self, index, rows):
        return super().rows(index + 2, rows)


@register
class BadHeldout(Fine):
    """A good training set, and another that is wrong from its first batch."""

    def datasets(self):
        heldout = fdl.Config(OnePass, batch_size=13, what="shape")
        return {**super().datasets(), "heldout": heldout}
'''


@pytest.fixture(autouse=True, scope="module")
def package():
    folder = home() / "mistakes"
    if not folder.exists():
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "all.py").write_text(EXPERIMENTS)
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


PAIRS = r'wanted is a pair \(value, weight\) of scalars .* return \{"loss": \(loss, weight\)\}'
# What the paragraph says, found and wanted.
REFUSED = {
    "NoPairs": rf"Returns.compute_loss returns float32\[\] as 'loss'; {PAIRS}",
    "Scalar": rf"compute_loss returns float32\[\]; {PAIRS}",
    "AuxSecond": rf"returns a tuple of \(float32\[\], a dict\); {PAIRS}",
    "NoLoss": rf"returns \['mse'\] without 'loss'; {PAIRS}",
    "Nothing": rf"compute_loss returns None; {PAIRS}",
    "Vector": rf"a tuple of \(float32\[13\], a float\) as 'loss'; {PAIRS}",
    "WeightPerRow": rf"a tuple of \(float32\[\], float32\[13\]\) as 'loss'; {PAIRS}",
    "Count": r"returns int32\[\] as the loss, which has no gradient; wanted is a float",
    "LossOfTwo": r"called with \(model, inputs, key\), but .*compute_loss takes \(model, inputs\)",
    "BuiltOptimizer": r"is built already.* Write fdl.Partial\(optax.adamw, .* in place of optax.ad",
    "NoDecayMethod": r"'decay_method'. Give it .*: fdl.Partial\(adafactor, decay_method=...\)",
    "NoRate": "scale_by_adam cannot be called with just learning_rate: got an unexpected keyword",
    "NamedOptimizer": r"is 'adamw'; wanted is a function .* such as fdl.Partial\(optax.adamw",
    "NoOptimizer": "returns_rate returns a float; wanted is an optax.GradientTransformation",
    "NamedRate": "learning_rate is '1e-3'; wanted is a number, or a schedule",
    "UnbuiltSchedule": r"Configure a schedule as fdl.Config\(linear_schedule, ...\)",
    "PartialLearner": r"LossTask.learner is a partial; wanted is a Learner: fdl.Config\(Learner",
    "ConfigModel": r"task.model: Mlp cannot be made: .*'rngs'.* write fdl.Partial\(Mlp, ...\)",
    "NoWidth": r"Mlp lacks width: set it in its config, such as fdl.Partial\(Mlp, width=...\)",
    "Misspelled": "Mlp has no setting 'widht'; it has width. Did you mean width",
    "BuiltModel": r"model is given as Identity itself; wanted is what builds .* fdl.Partial\(Ident",
    "AbstractTask": "task: NoComputeLoss cannot be made: .*abstract.*compute_loss",
    "AbstractPipeline": "datasets.train: L.*batches.*element_spec.*fingerprint.*num_batches",
    "Empty": r"no methods mesh\(\), task\(\), datasets\(\), run\(\). Add.*def mesh",
    "MeshTuple": r"mesh\(\) returns a tuple, wanted an fdl.Config, such as fdl.Config\(MeshConfig",
    "ListOfArrays": "InMemory.arrays is <class 'list'>; wanted is a dict of arrays by name",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_user_can_mend_is_one_paragraph_before_anything_compiles(name, tmp_path):
    said = refused(*run(f"all.{name}", tmp_path))
    assert re.search(REFUSED[name], said), said


# The user's line, and what was wrong with it.
THEIR_LINES = {
    "all.Shape": (
        "mistakes/all.py", "return (self.a(x) @ jnp.ones((9, 1)))[:, 0]",
        "in __call__", "TypeError: dot_general requires",
    ),
    "all.LayerTuple": (
        "mistakes/all.py", 'return jnp.square(model(inputs["x"]) - inputs["y"])', "in loss",
        "'tuple'",
    ),
    "all.PaxMapping": (
        "mistakes/all.py", 'task.model.weight_split_dims_mapping.wt = ("data", "mdl")', "in task",
        "has no fields here: assign the sequence itself",
    ),
    "syntax.One": ("mistakes/syntax.py", "def task(self)", "line 2", "SyntaxError: expected ':'"),
    "absent.One": ("mistakes/absent.py", "import torchvison", "line 2", "ModuleNotFoundError"),
    "misnamed.One": ("mistakes/misnamed.py", "import registr", "line 2", "ImportError: cannot"),
    "undefined.One": ("mistakes/undefined.py", "WIDTH = widht + 1", "line 2", "NameError: name"),
}


@pytest.mark.parametrize("name", THEIR_LINES)
def test_an_exception_of_the_users_code_is_their_line_and_its_traceback_a_file(name, tmp_path):
    job = tmp_path / "job"
    done = launch(*run(name, job))
    assert (done.code, done.num_compiled) == (1, 0)
    assert "Traceback" not in done.err and len(done.err.splitlines()) <= 6
    said = " ".join(done.err.split())
    file, line, *words = THEIR_LINES[name]
    assert said.startswith("error: ") and f"{file}, line" in said.split("`")[0]
    assert f"`{line}" in said or f"{line}`" in said
    assert all(one in said for one in words)
    path = re.search(r"The whole traceback is in (\S+)\.$", said)[1]
    # Of a job only once its directory is known to be its own.
    assert (path == str(job / "traceback.txt")) == job.exists()
    with open(path) as traceback:
        text = traceback.read()
    assert text.startswith("Traceback (most recent call last)") and file in text
    # The mended experiment may take the directory.
    if name == "all.Shape":
        assert launch(*run("all.Fine", job)).code == 0


OTHER_BATCHES = {
    "shape": r"'x' is float32\[13, 7\], wanted float32\[13, 5\]",
    "dtype": r"'x' is int32\[13, 5\], wanted float32\[13, 5\]",
    "names": r"has the leaves \['x'\]; wanted are \['x', 'y'\]",
    "list": r"is a list; wanted is a dict of arrays: \['x', 'y'\]",
    "none": "is None; wanted is a dict of arrays",
    "ended": r"ended after 2 batches, but training needs more; its num_batches says None",
}


@pytest.mark.parametrize("what", OTHER_BATCHES)
def test_a_batch_that_is_not_as_promised_is_named_at_its_step(what, tmp_path):
    done = launch(*run("all.Fine", tmp_path, f"datasets.train.what={what}"))
    said = " ".join(done.err.split())
    assert done.code == 2 and "Traceback" not in said
    assert re.search(OTHER_BATCHES[what], said), said
    assert "error: datasets.train" in said
    assert what == "ended" or "batch 2 (counted from 0)" in said
    assert "step 1/3" in done.out


def test_the_first_batch_of_an_evaluation_is_looked_at_before_training(tmp_path):
    done = launch(*run("all.BadHeldout", tmp_path))
    assert done.code == 2 and "compiling" not in done.out
    assert "datasets.heldout: batch 0 (counted from 0) has other shapes" in done.err


def test_a_nan_in_the_data_of_an_evaluation_is_named(tmp_path):
    done = launch(*run("all.BadHeldout", tmp_path, "datasets.heldout.what=nan"))
    assert done.code == 3, done.err
    assert "datasets.heldout: batch 0 (counted from 0) has NaN in 'y', rows 3, 7" in done.out


def test_a_pipeline_that_raises_is_the_users_line(tmp_path):
    done = launch(*run("all.Fine", tmp_path, "datasets.train.what=raises"))
    said = " ".join(done.err.split())
    assert done.code == 1 and '`raise LookupError("no such record")`' in said
    assert f"in {tmp_path}/traceback.txt" in said


@pytest.mark.parametrize("in_a_row", ["1", "100"])
def test_a_nan_in_the_data_is_named_by_batch_and_rows(in_a_row, tmp_path):
    settings = ["datasets.train.what=nan", f"run.max_skipped_steps_in_a_row={in_a_row}"]
    done = launch(*run("all.Fine", tmp_path, *settings))
    words = "datasets.train: batch 2 (counted from 0) has NaN in 'y', rows 3, 7"
    assert words in done.out
    # Where the run ends for it, that is what it says.
    assert (f"{words}: mend the data" in " ".join(done.err.split())) == (in_a_row == "1")


def test_options_that_there_are_not_are_told_the_nearest():
    for argv, words in {
        ("--job_dir=x",): "--job_dir=x is not an option of praxis_lite. Did you mean --job_log_dir?",
        ("run.seed=3",): "Fields of the config are set behind --set: --set run.seed=3",
        ("--run.seed=3",): "Fields of the config are set behind --set: --set run.seed=3",
        ("--mode=test",): "argument --mode: invalid choice: 'test'",
        ("--mode=eval", "--step=last"): "'last' is no checkpoint: wanted is a step's number, or b",
    }.items():
        assert words in refused(*argv)


def test_a_directory_that_is_none_is_refused(tmp_path):
    assert "--job_log_dir is empty, as where a variable of" in refused(*run("all.Fine", ""))
    long = tmp_path / ("x" * 300)
    assert "is no path (File name too long). Name another" in refused(*run("all.Fine", long))
    (tmp_path / "config.json").mkdir()
    assert "has a directory config.json" in refused(*run("all.Fine", tmp_path))
