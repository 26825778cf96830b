"""Experiments of which each is a mistake but `Fine`, which they vary; read as text by a test."""

import itertools

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite import Experiment, MeshConfig, RunConfig, register
from praxis_lite.core.learner.learner import Learner
from praxis_lite.core.task import Task
from praxis_lite.inputs import InMemory
from praxis_lite.inputs.base import IndexedPipeline, InputPipeline, spec_of
from praxis_lite.optimizers import adafactor
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
        return itertools.islice(batches, 2) if self.what == "ended" else batches

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
Twice = named("Twice", with_task(model=fdl.Partial(Mlp, 7, width=5)))
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
