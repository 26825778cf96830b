"""A program of a user that mypy and pyright accept in strict mode; part of `make lint`."""

from collections.abc import Mapping

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import praxis_lite as pl
from praxis_lite.core import Learner, MeshConfig, Task
from praxis_lite.inputs import InMemory
from praxis_lite.layers import BaseLayer, Linear


class Mlp(BaseLayer):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = Linear(2, 37, weight_split_dims_mapping=(None, "mdl"), rngs=rngs)
        self.down = Linear(37, 1, weight_split_dims_mapping=("mdl", None), rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.up(points)))[:, 0]


class Regression(Task):
    def compute_loss(
        self, model: Mlp, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        error = model(inputs["points"]) - inputs["y"]
        return {"loss": (jnp.mean(error**2), jnp.float32(error.size))}


class PrintLoss(pl.Hook):
    def after_metrics(self, step_metrics: pl.StepMetrics) -> None:
        print(step_metrics.step, step_metrics.line["loss"])


def load_points() -> dict[str, np.ndarray]:
    points = np.random.default_rng(0).uniform(-1, 1, (640, 2)).astype(np.float32)
    return {"points": points, "y": points[:, 0] * points[:, 1]}


@pl.register
class LearnProduct(pl.Experiment):
    def mesh(self) -> fdl.Config[MeshConfig]:
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def task(self) -> fdl.Config[Regression]:
        learner = fdl.Config(Learner, optimizer=optax.adam, learning_rate=1e-2)
        return fdl.Config(Regression, model=fdl.Partial(Mlp), learner=learner)

    def datasets(self) -> dict[str, fdl.Config[InMemory]]:
        return {"train": fdl.Config(InMemory, load_points, batch_size=64, shuffle=True)}

    def run(self) -> fdl.Config[pl.RunConfig]:
        return fdl.Config(pl.RunConfig, num_train_steps=20)


if __name__ == "__main__":
    try:
        trained = pl.train(LearnProduct, "/tmp/learn_product", hooks=[PrintLoss()])
    except pl.PeerLost as lost:
        raise SystemExit(f"start again: {lost}") from lost
    print(trained.predict(load_points()["points"]).shape)
