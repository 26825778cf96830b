"""Trains a model of its own on a mesh with a Partitioner alone: no Experiment, no Trainer.

    python examples/minimal.py

The devices are simulated, so it runs anywhere, in seconds. Neither the model's sizes nor the batch
divide by the mesh of 4 x 2 devices: arrays are stored padded, and no line below sees that. At the
end the same training on one device gives the same losses and weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite import MeshConfig, Task
from praxis_lite.core import Learner, Partitioner, constrain, make_mesh, simulate_devices
from praxis_lite.layers import BaseLayer

NUM_STEPS = 200
NUM_ROWS, DIMS, HIDDEN = 61, 13, 37  # Neither 4 nor 2 divides any of them.
BATCH = ("replica", "data")  # The mesh axes that the rows of a batch lie along.


# The model. Its code is that of one device; beside each weight stand the mesh axes of its dims.


class Block(BaseLayer):
    """Returns `x + silu(x @ up) @ down`: [rows, DIMS] -> [rows, DIMS]."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = self.weight((DIMS, HIDDEN), ("data", "mdl"), rngs=rngs)
        self.down = self.weight((HIDDEN, DIMS), ("mdl", "data"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = constrain(jax.nn.silu(x @ self.up[...]), (BATCH, "mdl"))
        return x + hidden @ self.down[...]


class Wave(BaseLayer):
    """Returns a number for each point: [rows, 2] -> [rows]."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.enter = self.weight((2, DIMS), (None, "data"), rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.leave = self.weight((DIMS, 1), ("data", None), rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        x = points @ self.enter[...]
        for block in self.blocks:
            x = block(x)
        return (x @ self.leave[...])[:, 0]


# The task: what is learned. A metric is a mean and what it weighs.


class Regression(Task):
    """Trains a model on the squared error to `y`."""

    def compute_loss(self, model, inputs, key):
        error = model(inputs["points"]) - inputs["y"]
        return {"loss": (jnp.mean(error**2), jnp.float32(error.size))}


# The data: points (a, b) and sin(3 a) b, a NumPy batch for each step.


def batch(step: int) -> dict[str, np.ndarray]:
    """Returns the rows of a step."""
    points = np.random.default_rng(step).uniform(-1, 1, (NUM_ROWS, 2)).astype(np.float32)
    return {"points": points, "y": np.sin(3 * points[:, 0]) * points[:, 1]}


# The training: a partitioner, a state, a loop.


def partitioner_on(*mesh_shape: int) -> Partitioner:
    """Returns what compiles the task for a mesh of the axes replica, data and mdl."""
    learner = Learner(optax.adam, learning_rate=2e-2, clip_gradient_norm_to_value=1.0)
    splits = {"map_1d": (BATCH,), "map_2d": (BATCH, None)}  # Of a batch's arrays, by their rank.
    task = Regression(Wave, learner, inputs_split_mapping=splits)
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=mesh_shape)))


def train(partitioner: Partitioner) -> tuple[list[float], dict[str, np.ndarray]]:
    """Returns the loss of each step, and the trained weights by path at their logical shapes."""
    key = partitioner.key(0)
    state, losses = partitioner.init(key), []
    for step in range(NUM_STEPS):
        inputs = partitioner.global_batch(batch(step))
        state, outputs = partitioner.train_step(state, inputs, key)
        loss, _ = outputs["metrics"]["loss"]
        losses.append(float(loss))
    weights = partitioner.layout.unpad(state).mdl_vars["params"]
    paths = jax.tree_util.tree_leaves_with_path(weights)
    return losses, {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(weight)
        for path, weight in paths
    }


def print_splits(partitioner: Partitioner) -> None:
    """Prints how each weight is stored: its shape, the padded one, and the axes of each dim."""
    print(f"{'weight':36} {'shape':>10} {'stored':>10}  split over      a device holds")
    for leaf in partitioner.layout.leaves():
        if leaf.path.startswith("mdl_vars/"):
            spec = ", ".join(str(axes or "-") for axes in leaf.spec)
            print(f"{leaf.path:36} {leaf.shape!s:>10} {leaf.padded_shape!s:>10}  {spec:14}"
                  f"{leaf.bytes_per_device:6} of {4 * int(np.prod(leaf.shape)):5} bytes")


def main() -> None:
    """Trains on eight devices and on one, and compares."""
    simulate_devices(8)
    partitioner = partitioner_on(1, 4, 2)
    print_splits(partitioner)

    losses, weights = train(partitioner)
    for step in (0, 1, 10, 50, 100, NUM_STEPS - 1):
        print(f"step {step:3}  loss {losses[step]:.5f}")

    losses_alone, weights_alone = train(partitioner_on(1, 1, 1))
    off = max(abs(a - b) for a, b in zip(losses, losses_alone, strict=True))
    weights_off = max(np.abs(weights[path] - weights_alone[path]).max() for path in weights)
    print(f"one device: losses differ by at most {off:.1e}, weights by {weights_off:.1e}")
    assert off < 1e-5 and weights_off < 1e-4


if __name__ == "__main__":
    main()
