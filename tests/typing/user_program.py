"""A program of a user, which mypy, pyright and ty accept in strict mode: `make lint`."""

from collections.abc import Mapping

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import praxis_lite as pl
from praxis_lite.core import Learner, MeshConfig, Partitioner, Task, make_mesh
from praxis_lite.inputs import InMemory
from praxis_lite.layers import BaseLayer, Linear


class Mlp(BaseLayer):
    """Two layers."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = Linear(2, 37, weight_split_dims_mapping=(None, "mdl"), rngs=rngs)
        self.down = Linear(37, 1, weight_split_dims_mapping=("mdl", None), rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.up(points)))[:, 0]


class Regression(Task):
    """Squared error."""

    def compute_loss(
        self, model: Mlp, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        error = model(inputs["points"]) - inputs["y"]
        return {"loss": (jnp.mean(error**2), jnp.float32(error.size))}


class Print(pl.Hook):
    """Prints the number of each step."""

    every = 10

    def after_step(self, step: pl.DispatchedStep) -> str | None:
        print(step.step)
        return None


def load() -> dict[str, np.ndarray]:
    points = np.random.default_rng(0).uniform(-1, 1, (640, 2)).astype(np.float32)
    return {"points": points, "y": points[:, 0] * points[:, 1]}


@pl.register
class Products(pl.Experiment):
    """Learns a product."""

    def mesh(self) -> fdl.Config[MeshConfig]:
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def task(self) -> fdl.Config[Regression]:
        learner = fdl.Config(Learner, optimizer=optax.adam, learning_rate=1e-2)
        return fdl.Config(Regression, model=fdl.Partial(Mlp), learner=learner)

    def datasets(self) -> dict[str, fdl.Config[InMemory]]:
        return {"train": fdl.Config(InMemory, load, batch_size=64, shuffle=True)}

    def run(self) -> fdl.Config[pl.RunConfig]:
        return fdl.Config(pl.RunConfig, num_train_steps=20)


if __name__ == "__main__":
    run = pl.RunConfig(num_train_steps=20)
    print(run.seed + 1)
    task = Regression(Mlp, Learner(optax.adam, learning_rate=1e-2))
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2))))
    try:
        trained = pl.train(Products, "/tmp/products", hooks=[Print()])
    except pl.Error as error:
        raise SystemExit(str(error)) from error
    prediction = trained.predict(load()["points"])
    print(prediction.shape, trained.evaluate("train")["loss"])

