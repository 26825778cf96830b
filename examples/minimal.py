"""Trains a model of its own on a mesh with a Partitioner alone: no Experiment, no Trainer.

    python examples/minimal.py

The devices are simulated, so it runs anywhere, in seconds. Neither the model's sizes nor the batch
divide by the mesh of 4 x 2 devices: arrays are stored padded, and no line below sees that. After
100 steps it stops, and goes on from its checkpoint on a mesh of 3 x 2 devices. At the end the same
training on one device, in one go, gives the same losses and weights.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite import Checkpoints, SaveSettings
from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    Task,
    constrain,
    make_mesh,
    simulate_devices,
)
from praxis_lite.layers import BaseLayer

NUM_STEPS, SAVE_EVERY = 200, 100
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


# The training: a partitioner, a state, a loop that can be killed at any time.


def partitioner_on(*mesh_shape: int) -> Partitioner:
    """Returns what compiles the task for a mesh of the axes replica, data and mdl."""
    learner = Learner(optax.adam, learning_rate=2e-2, clip_gradient_norm_to_value=1.0)
    splits = {"map_1d": (BATCH,), "map_2d": (BATCH, None)}  # Of a batch's arrays, by their rank.
    task = Regression(Wave, learner, inputs_split_mapping=splits)
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=mesh_shape)))


def train(
    partitioner: Partitioner, folder: str, num_steps: int = NUM_STEPS
) -> tuple[dict[int, float], dict[str, np.ndarray]]:
    """Trains from the newest checkpoint in the folder, if there is one, up to `num_steps`.

    Returns:
      The loss of each step made, by its number, and the weights by path at their logical shapes.
    """
    key, losses = partitioner.key(0), {}
    with Checkpoints(folder, saving=SaveSettings()) as checkpoints:
        if checkpoints.latest_step() is None:
            state = partitioner.init(key)
        else:  # Of any mesh: it is cut and padded to this one.
            state = checkpoints.restore(partitioner.layout, partitioner.mesh).state
        for step in range(int(state.step), num_steps):
            inputs = partitioner.global_batch(batch(step))
            state, outputs = partitioner.train_step(state, inputs, key)
            losses[step] = float(outputs["metrics"]["loss"][0])
            if (step + 1) % SAVE_EVERY == 0:
                checkpoints.save(step + 1, state, partitioner.layout)
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
    """Trains on eight devices, goes on with six, and compares with one."""
    simulate_devices(8)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as folder_alone:
        partitioner = partitioner_on(1, 4, 2)
        print_splits(partitioner)
        losses, _ = train(partitioner, folder, num_steps=SAVE_EVERY)

        print("\nrestored on 3 x 2 devices:")
        partitioner = partitioner_on(1, 3, 2)
        print_splits(partitioner)
        losses_after, weights = train(partitioner, folder)
        losses |= losses_after
        for step in (0, 1, 10, 99, 100, NUM_STEPS - 1):
            print(f"step {step:3}  loss {losses[step]:.5f}")

        losses_alone, weights_alone = train(partitioner_on(1, 1, 1), folder_alone)
    assert losses.keys() == losses_alone.keys() == set(range(NUM_STEPS))
    off = max(abs(losses[step] - losses_alone[step]) for step in losses)
    weights_off = max(np.abs(weights[path] - weights_alone[path]).max() for path in weights)
    print(f"one device: losses differ by at most {off:.1e}, weights by {weights_off:.1e}")
    assert off < 1e-5 and weights_off < 1e-4


if __name__ == "__main__":
    main()
