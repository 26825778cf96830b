"""Trains a custom model on a mesh with only a Partitioner, without an Experiment or a Trainer.

    python examples/minimal.py

It runs anywhere in seconds, on simulated devices. No dim of the model or the batch is divisible by
the axis sizes of the 4 x 2 mesh, so arrays are stored with padding, which the code below does not
have to handle. After 100 steps, training stops and resumes from its checkpoint on a 3 x 2 mesh.
Finally, the script checks that uninterrupted training on one device produces the same losses and
weights.
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
NUM_ROWS, DIMS, HIDDEN = 61, 13, 37  # Not divisible by 4 or 2.
BATCH = ("replica", "data")  # Mesh axes over which the rows of a batch are split.


# The model: single-device code, plus the mesh axes of each weight's dims.


class Block(BaseLayer):
    """A residual block, `x + silu(x @ up) @ down`: [rows, DIMS] -> [rows, DIMS]."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = self.weight((DIMS, HIDDEN), ("data", "mdl"), rngs=rngs)
        self.down = self.weight((HIDDEN, DIMS), ("mdl", "data"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = constrain(jax.nn.silu(x @ self.up[...]), (BATCH, "mdl"))
        return x + hidden @ self.down[...]


class Wave(BaseLayer):
    """Maps points [rows, 2] to predicted values [rows]."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.enter = self.weight((2, DIMS), (None, "data"), rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.leave = self.weight((DIMS, 1), ("data", None), rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        x = points @ self.enter[...]
        for block in self.blocks:
            x = block(x)
        return (x @ self.leave[...])[:, 0]


# The task: the loss and the metrics. A metric is a pair (mean, weight).


class Regression(Task):
    """Trains a model on the mean squared error between its predictions and `y`."""

    def compute_loss(self, model, inputs, key):
        error = model(inputs["points"]) - inputs["y"]
        return {"loss": (jnp.mean(error**2), jnp.float32(error.size))}


# The data: points (a, b) and targets sin(3 a) b, with one NumPy batch per step.


def batch(step: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step."""
    points = np.random.default_rng(step).uniform(-1, 1, (NUM_ROWS, 2)).astype(np.float32)
    return {"points": points, "y": np.sin(3 * points[:, 0]) * points[:, 1]}


# The training loop, which may be killed and restarted at any time.


def partitioner_on(*mesh_shape: int) -> Partitioner:
    """Returns a Partitioner for the task on a mesh with the axes replica, data and mdl."""
    learner = Learner(optax.adam, learning_rate=2e-2, clip_gradient_norm_to_value=1.0)
    splits = {"map_1d": (BATCH,), "map_2d": (BATCH, None)}  # Mesh axes of each dim, by rank.
    task = Regression(Wave, learner, inputs_split_mapping=splits)
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=mesh_shape)))


def train(
    partitioner: Partitioner, folder: str, num_steps: int = NUM_STEPS
) -> tuple[dict[int, float], dict[str, np.ndarray]]:
    """Trains up to `num_steps`, resuming from the latest checkpoint in the folder, if any.

    Returns:
      (losses, weights): The loss of each new step, by step, and the unpadded weights, by path.
    """
    key, losses = partitioner.key(0), {}
    with Checkpoints(folder, saving=SaveSettings()) as checkpoints:
        if checkpoints.latest_step() is None:
            state = partitioner.init(key)
        else:  # Arrays are resharded and padded if the checkpoint was saved on another mesh.
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
    """Prints the shape, the padded shape and the mesh axes of each weight."""
    print(f"{'weight':36} {'shape':>10} {'stored':>10}  split over      a device holds")
    for leaf in partitioner.layout.leaves():
        if leaf.path.startswith("mdl_vars/"):
            spec = ", ".join(str(axes or "-") for axes in leaf.spec)
            print(
                f"{leaf.path:36} {leaf.shape!s:>10} {leaf.padded_shape!s:>10}  {spec:14}"
                f"{leaf.bytes_per_device:6} of {4 * int(np.prod(leaf.shape)):5} bytes"
            )


def main() -> None:
    """Trains on eight devices, resumes on six, and compares the results with one device."""
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
    loss_error = max(abs(losses[step] - losses_alone[step]) for step in losses)
    weight_error = max(np.abs(weights[path] - weights_alone[path]).max() for path in weights)
    print(f"one device: losses differ by at most {loss_error:.1e}, weights by {weight_error:.1e}")
    assert loss_error < 1e-5 and weight_error < 1e-4


if __name__ == "__main__":
    main()
