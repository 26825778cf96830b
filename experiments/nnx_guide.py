"""The unmodified models of Flax's guide to scaling NNX modules, trained on a mesh.

See https://flax.readthedocs.io/en/latest/guides/flax_gspmd.html. The guide's calls that shard the
model, optimizer and checkpoint are not needed. Any size works, even a prime:
`--set task.model.depth=1021 --set datasets.train.arrays.depth=1021`.
"""

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite import EvaluationSettings, Experiment, MeshConfig, RunConfig, register
from praxis_lite.core import Learner, WeightSharding
from praxis_lite.inputs import InMemory
from praxis_lite.tasks.loss import LossTask

__all__ = [
    "DotReluDot",
    "DotReluDotModel",
    "LogicalDotReluDot",
    "LogicalDotReluDotModel",
    "noise",
    "squared_error",
]

SHARDING_RULES = (("batch", "data"), ("hidden", "model"), ("embed", None))


class DotReluDotModel(nnx.Module):
    """Two matmuls with a ReLU in between; the weights are annotated with mesh axes."""

    def __init__(self, depth: int, rngs: nnx.Rngs):
        init_fn = nnx.initializers.lecun_normal()
        self.dot1 = nnx.Linear(
            depth,
            depth,
            kernel_init=nnx.with_partitioning(init_fn, (None, "model")),
            use_bias=False,
            rngs=rngs,
        )
        self.w2 = nnx.Param(init_fn(rngs.params(), (depth, depth)), out_sharding=("model", None))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.dot1(x))
        y = jax.lax.with_sharding_constraint(y, PartitionSpec("data", "model"))
        return jnp.dot(y, self.w2[...])


class LogicalDotReluDotModel(nnx.Module):
    """DotReluDotModel with logical axes: `dot1` declares rules, and `w2` uses the job's rules."""

    def __init__(self, depth: int, rngs: nnx.Rngs):
        init_fn = nnx.initializers.lecun_normal()
        kernel_init = nnx.with_metadata(
            init_fn, out_sharding=("embed", "hidden"), sharding_rules=SHARDING_RULES
        )
        self.dot1 = nnx.Linear(depth, depth, kernel_init=kernel_init, use_bias=False, rngs=rngs)
        self.w2 = nnx.Param(
            nnx.with_metadata(init_fn, out_sharding=("hidden", "embed"))(
                rngs.params(), (depth, depth)
            )
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.dot1(x))
        y = jax.lax.with_sharding_constraint(y, PartitionSpec("data", None))
        return jnp.dot(y, self.w2[...])


def noise(depth: int) -> dict[str, jax.Array]:
    """Returns the guide's single batch: 8 random rows `x` and their targets `y`."""
    return {
        name: jax.random.normal(jax.random.key(seed), (8, depth))
        for name, seed in (("x", 1), ("y", 2))
    }


def squared_error(model: nnx.Module, inputs: dict[str, jax.Array], key: jax.Array | None):
    """Returns the mean squared error of each row [B], so that the task can ignore padding rows."""
    return jnp.mean((model(inputs["x"]) - inputs["y"]) ** 2, axis=1)


@register
class DotReluDot(Experiment):
    """Overfits Flax's DotReluDot, two 1024 x 1024 matrices, to a batch of noise."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(2, 4), axis_names=("data", "model"))

    def task(self):
        learner = fdl.Config(Learner, fdl.Partial(optax.adam), learning_rate=1e-3)
        return fdl.Config(
            LossTask,
            fdl.Partial(DotReluDotModel, depth=1024),
            squared_error,
            learner,
            inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
        )

    def datasets(self):
        arrays = fdl.Partial(noise, depth=1024)
        return {
            "train": fdl.Config(InMemory, arrays, batch_size=8, shuffle=True),
            "learned": fdl.Config(InMemory, arrays, batch_size=8, shuffle=False),
        }

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=20,
            evaluation=fdl.Config(EvaluationSettings, every_steps=5),
        )


@register
class LogicalDotReluDot(DotReluDot):
    """DotReluDot with logical axes, which the rules of the model and the job map to mesh axes."""

    def task(self):
        task = super().task()
        fdl.update_callable(task.model, LogicalDotReluDotModel)
        task.weight_sharding = fdl.Config(WeightSharding, logical_axis_rules=SHARDING_RULES)
        return task
