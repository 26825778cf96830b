"""Experiments so small that a check of them takes seconds, of sizes that no mesh divides."""

import dataclasses
from typing import Literal

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from praxis_lite import Experiment, MeshConfig, RunConfig, Task
from praxis_lite.core import Learner, Partitioner
from praxis_lite.core.collectives import ExplicitCollectives
from praxis_lite.decode import Greedy
from praxis_lite.experiments.finetune import LORA
from praxis_lite.inputs import InMemory
from praxis_lite.layers import (
    BatchNorm,
    StackedTransformer,
    TransformerFeedForwardMoe,
    adapted,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.models import FunctionModel, LinenModel
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.tools.check import collectives

ROWS, LENGTH, VOCABULARY = 12, 8, 37
BATCH = ("replica", "data")


def texts():
    """Returns rows of random tokens, of which some count less and some not at all."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, VOCABULARY, (3 * ROWS, LENGTH + 1)).astype(np.int32)
    weights = rng.choice([0.0, 0.5, 1.0, 2.0], (3 * ROWS, LENGTH)).astype(np.float32)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights}


def prompts():
    """Returns the beginnings of rows, of several lengths."""
    ids = np.random.default_rng(5).integers(0, VOCABULARY, (5, 4)).astype(np.int32)
    lengths = np.array((4, 2, 1, 4, 3), np.int32)
    return {"ids": ids, "prefix_lengths": lengths, "weights": np.ones(5, np.float32)}


def points():
    """Returns points of 6 numbers, their classes and weights."""
    rng = np.random.default_rng(4)
    return {
        "inputs": rng.normal(size=(3 * ROWS, 6)).astype(np.float32),
        "labels": rng.integers(0, 3, 3 * ROWS).astype(np.int32),
        "weights": rng.choice([0.0, 0.5, 1.0, 2.0], 3 * ROWS).astype(np.float32),
    }


def learner(**settings):
    """Returns the config of a learner with all that it can do to a weight."""
    settings = {"clip_gradient_norm_to_value": 0.5, "ema_decay": 0.9, **settings}
    optimizer = fdl.Partial(optax.adamw, weight_decay=0.1)
    return fdl.Config(Learner, optimizer=optimizer, learning_rate=0.01, **settings)


class Lm(Experiment):
    """Two scanned layers with dropout; vocabulary 37, model dims 13, hidden 29, 3 heads."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 2, 2))

    def task(self):
        model = rotary_lm(
            vocab_size=VOCABULARY,
            model_dims=13,
            hidden_dims=29,
            num_heads=3,
            dim_per_head=6,
            num_layers=2,
            residual_dropout_prob=0.1,
        )
        return fdl.Config(
            LanguageModelTask,
            model=set_sharding_params(model),
            learner=learner(),
            inputs_split_mapping={"map_1d": (BATCH,), "map_2d": (BATCH, None)},
            decoder=fdl.Config(Greedy, max_decode_steps=4),
        )

    def datasets(self):
        return {"train": fdl.Config(InMemory, texts, batch_size=ROWS, shuffle=True)}

    def decode_datasets(self):
        return {"prompts": fdl.Config(InMemory, prompts, batch_size=5, shuffle=False)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=3)


class Lora(Lm):
    """Adapters over frozen weights, which a job of its own would load."""

    def task(self):
        task = super().task()
        block = task.model.transformer_layer_tpl
        block.tr_atten_tpl = fdl.Partial(adapted, base_tpl=block.tr_atten_tpl, rank=2)
        task.learner.bprop_variable_inclusion = LORA
        return task


class Experts(Lm):
    """Lm whose second layer has three experts, on an axis of their own."""

    def mesh(self):
        return fdl.Config(
            MeshConfig, ici_mesh_shape=(2, 2, 1), axis_names=("data", "expert", "mdl")
        )

    def task(self):
        task = super().task()
        dense = task.model.transformer_layer_tpl
        experts = fdl.Partial(
            TransformerFeedForwardMoe,
            num_experts=3,
            moe_load_balance_loss_weight=0.1,
            moe_router_z_loss_weight=0.1,
        )
        task.model.transformer_layer_tpl = [dense, fdl.copy_with(dense, tr_fflayer_tpl=experts)]
        set_sharding_params(task.model, "expert")
        batch = ("data", "expert")
        task.inputs_split_mapping = {"map_1d": (batch,), "map_2d": (batch, None)}
        return task


class BalancedExperts(Experts):
    """Experts of DeepSeek-V3's router, without a capacity, balanced without a loss."""

    def task(self):
        task = super().task()
        experts = task.model.transformer_layer_tpl[1].tr_fflayer_tpl
        experts.gating_func, experts.num_experts_per_token = "top_k", 2
        experts.dropless, experts.score_func = True, "sigmoid"
        experts.bias_update_rate, experts.moe_load_balance_loss_weight = 0.01, 0.0
        return task


class PointsTask(Task):
    """Classifies points; all that a user writes by hand, as it should be."""

    weight_unit = "points"
    required_inputs = ("inputs", "labels", "weights")

    def compute_loss(self, model, inputs, key):
        """Returns means weighted by the points' weights."""
        logits = self.logits(model, inputs, key)
        weights = inputs["weights"]
        total = jnp.sum(weights)
        xent = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["labels"])
        is_right = (jnp.argmax(logits, -1) == inputs["labels"]).astype(jnp.float32)
        mean = lambda x: (jnp.sum(x * weights) / jnp.maximum(total, 1e-9), total)  # noqa: E731
        return {"loss": mean(xent), "accuracy": mean(is_right)}, {"xent": xent}

    def logits(self, model, inputs, key):
        """Returns logits [B, 3] of points [B, 6]; with a key, some features are dropped."""
        x = inputs["inputs"]
        if key is not None:
            x = x * jax.random.bernoulli(key, 0.8, x.shape)
        hidden = jnp.tanh(x @ model["first"]["w"] + model["first"]["b"][None])
        return hidden @ model["last"]["w"]

    def decode(self, model, inputs, key):
        """Returns the likeliest class of each point."""
        return {"class": jnp.argmax(self.logits(model, inputs, None), -1)}


def init_points(key):
    """Returns the weights of an MLP with 5 hidden features."""
    first, last = jax.random.split(key)
    return {
        "first": {"w": jax.random.normal(first, (6, 5)), "b": jnp.zeros(5)},
        "last": {"w": jax.random.normal(last, (5, 3))},
    }


POINT_SPECS = {"first": {"w": ("data", "mdl"), "b": ("mdl",)}, "last": {"w": ("mdl", "data")}}


class Points(Experiment):
    """An MLP of functions and a task of the user's own, split by the compiler."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(2, 2), axis_names=("data", "mdl"))

    def task(self):
        model = fdl.Config(FunctionModel, init_points, specs=POINT_SPECS)
        return fdl.Config(
            PointsTask,
            model,
            learner(),
            inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
        )

    def datasets(self):
        return {"train": fdl.Config(InMemory, points, batch_size=ROWS, shuffle=True)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=3)


class Points13(Points):
    """The same of 13 rows a batch, which a check cuts; tests of 11 rows, and points to classify."""

    def datasets(self):
        return {
            "train": fdl.Config(InMemory, points, batch_size=13, shuffle=True),
            "test": fdl.Config(InMemory, points, batch_size=11, shuffle=False),
        }

    def decode_datasets(self):
        return {"points": fdl.Config(InMemory, points, batch_size=9, shuffle=False)}


class PointsByHand(Points):
    """The same with explicit collectives, in blocks that are gathered when they are read."""

    def partitioner(self):
        return fdl.Partial(Partitioner, gradients=fdl.Config(ExplicitCollectives))


class Normed(BaseLayer):
    """A linear map, a norm over the batch, another linear map."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = self.weight((6, 5), ("data", "mdl"), rngs=rngs)
        self.norm = BatchNorm(5, rngs=rngs)
        self.last = self.weight((5, 3), ("mdl", "data"), rngs=rngs)

    def __call__(self, x, paddings, key):
        x = (x @ self.first[...])[:, None, :]
        x = self.norm(x, paddings=paddings[:, None], key=key)
        return jnp.tanh(x[:, 0]) @ self.last[...]


class NormedTask(PointsTask):
    """PointsTask with a layer whose norm leaves rows of filler out."""

    def logits(self, model, inputs, key):
        """Returns logits [B, 3] of points [B, 6]."""
        paddings = (inputs["weights"] == 0).astype(jnp.float32)
        return model(inputs["inputs"], paddings, key)


class Norms(Points):
    """A batch norm between two linear maps."""

    def task(self):
        return fdl.Config(
            NormedTask,
            fdl.Partial(Normed),
            learner(),
            inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
        )


@dataclasses.dataclass(frozen=True)
class HowConfig:
    """How a model of a user's own computes; another one makes the same numbers."""

    remat: bool = True
    attention_impl: Literal["fast", "slow"] = "fast"
    unroll: int = 1
    width: int = 5


def hidden_of(x, w, remat, unroll):
    """Returns the hidden features of two layers, scanned."""
    layer = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    layer = jax.checkpoint(layer) if remat else layer
    return jax.lax.scan(layer, x, w, unroll=unroll)[0]


class LinenPoints(nn.Module):
    """Logits [B, 3] of points [B, 6], with settings of how it computes."""

    use_remat: bool = True
    scan_layers: bool = False
    unroll: int = 1

    @nn.compact
    def __call__(self, x):
        w = self.param("hidden", nn.initializers.normal(0.3), (2, 6, 6))
        if self.scan_layers:
            x = hidden_of(x, w, self.use_remat, self.unroll)
        else:
            for layer in w:
                x = jnp.tanh(x @ layer)
        return nn.Dense(3, name="last")(x)


class NnxPoints(nnx.Module):
    """The same, with its settings in an object."""

    def __init__(self, config: HowConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.hidden = nnx.Param(jax.random.normal(rngs.params(), (2, 6, 6)))
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        x = hidden_of(x, self.hidden[...], self.config.remat, self.config.unroll)
        return self.last(_projected(x, self.config.attention_impl))


def _projected(x, attention_impl):
    return x if attention_impl == "fast" else x.T.T


class CalledTask(PointsTask):
    """PointsTask of a model that is called."""

    def logits(self, model, inputs, key):
        """Returns logits [B, 3] of points [B, 6]."""
        return model(inputs["inputs"])


def called(model):
    """Returns the config of a CalledTask."""
    return fdl.Config(
        CalledTask,
        model,
        learner(),
        inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
    )


class OfLinen(Points13):
    """A Linen model with settings of how it computes."""

    def task(self):
        example = jnp.zeros((1, 6))
        return called(fdl.Config(LinenModel, fdl.Config(LinenPoints), example))


class OfNnx(Points13):
    """An NNX model whose settings of how it computes lie in a dataclass."""

    def task(self):
        return called(fdl.Partial(NnxPoints, HowConfig()))


class FunctionsTask(PointsTask):
    """PointsTask of functions with settings of how they compute."""

    def __init__(self, *args, how=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.how = how

    def logits(self, model, inputs, key):
        """Returns logits [B, 3] of points [B, 6]."""
        x = hidden_of(inputs["inputs"], model["hidden"], self.how["remat"], self.how["unroll"])
        return x @ model["last"]


def init_functions(key):
    """Returns the weights of a FunctionsTask."""
    return {"hidden": jax.random.normal(key, (2, 6, 6)), "last": jax.random.normal(key, (6, 3))}


class OfFunctions(Points13):
    """A model of functions whose settings of how they compute lie in a dict of its task."""

    def task(self):
        return fdl.Config(
            FunctionsTask,
            fdl.Config(FunctionModel, init_functions),
            learner(),
            how={"remat": True, "unroll": 1},
            inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
        )


class CollectivesTask(PointsTask):
    """PointsTask of a model with collectives of the user's own."""

    def logits(self, model, inputs, key):
        """Returns logits [B, 3] of points [B, 6]."""
        return collectives.logits(model, inputs["inputs"])


class Collectives(Points):
    """A user's own `jax.shard_map`, with each kind of collective; sizes that two devices divide."""

    def datasets(self):
        return {"train": fdl.Config(InMemory, points, batch_size=16, shuffle=True)}

    def task(self):
        model = fdl.Config(FunctionModel, collectives.init)
        return fdl.Config(
            CollectivesTask,
            model,
            learner(),
            inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
        )


class RematStack(nnx.Module):
    """Three layers with dropout, a mean of their features, and counts of calls; remat by a field.

    Args:
      remat: compute each layer again in the backward pass.
      scanned: the layers in a loop, or in a row.
    """

    def __init__(self, remat: bool = True, scanned: bool = False, *, rngs: nnx.Rngs):
        self.remat, self.scanned = remat, scanned
        self.hidden = nnx.Param(0.5 * jax.random.normal(rngs.params(), (3, 6, 6)))
        self.last = nnx.Linear(6, 3, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(6))
        self.num_calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, key):
        keys = None if key is None else jax.random.split(key, 3)
        layer = rematted(dropped_layer) if self.remat else dropped_layer
        if self.scanned:
            x, _ = jax.lax.scan(
                lambda x, given: (layer(x, *given), None), x, (self.hidden[...], keys)
            )
        else:
            for i in range(3):
                x = layer(x, self.hidden[i], None if keys is None else keys[i])
        if key is not None:
            updated(self, x)
        return self.last(x)


def rematted(layer):
    """Returns the layer, computed again in the backward pass."""
    return jax.checkpoint(layer)


def dropped_layer(x, w, key):
    """Returns the features of a layer, some of them dropped."""
    h = jnp.tanh(x @ w)
    return h if key is None else h * jax.random.bernoulli(key, 0.7, h.shape)


def updated(stack, x):
    """Moves the stack's mean of the features, and counts the call."""
    stack.mean[...] = 0.9 * stack.mean[...] + 0.1 * jnp.mean(jax.lax.stop_gradient(x), axis=0)
    stack.num_calls[...] += 1


class KeyedTask(PointsTask):
    """PointsTask of a model that is called with a key."""

    def logits(self, model, inputs, key):
        """Returns logits [B, 3] of points [B, 6]."""
        return model(inputs["inputs"], key)


class RematOfOthers(Points):
    """A stack with dropout, statistics and a count, whose field says remat."""

    stack = fdl.Partial(RematStack)

    def task(self):
        return fdl.Config(
            KeyedTask,
            self.stack,
            learner(),
            inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
        )


class ScannedRematOfOthers(RematOfOthers):
    """The same with its layers in a loop, off where the job has it."""

    stack = fdl.Partial(RematStack, remat=False, scanned=True)


class BareRematOfOthers(RematOfOthers):
    """The same, the class itself in the config."""

    stack = RematStack


class FixedRemat(nnx.Module):
    """A stack whose remat no setting says: an attribute of it does."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.stack = RematStack(rngs=rngs)

    def __call__(self, x, key):
        return self.stack(x, key)


class InnerRematOfOthers(RematOfOthers):
    """The same layer, built inside a model whose config does not mention it."""

    stack = fdl.Partial(FixedRemat)


class RowOfLayers(Lm):
    """Lm with its layers in a row, which by default keep all."""

    def task(self):
        task = super().task()
        task.model.stacked_transformer_tpl = fdl.Partial(StackedTransformer)
        return task
