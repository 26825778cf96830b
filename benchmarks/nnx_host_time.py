"""Measures the host time of a train step for a Flax NNX model with 100 weights.

`python -m benchmarks.nnx_host_time` prints the median time until the call to a step returns. In a
single run, it alternates between the `Partitioner`, `nnx.jit` as in Flax's guides, and `jax.jit`
over a flat list of the same arrays, once for the Partitioner's step and once for a hand-written
step.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    make_mesh,
    simulate_devices,
)
from praxis_lite.tasks.loss import LossTask

NUM_LAYERS, DIMS, GOAL = 50, 4, 1.3  # Each layer has a kernel and a bias.


class Tower(nnx.Module):
    """A stack of 50 small layers with 100 weights."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(DIMS, DIMS, rngs=rngs) for _ in range(NUM_LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def squared_error(model: Callable[..., jax.Array], inputs: Any, key: Any = None) -> jax.Array:
    """Returns the mean squared error of the model."""
    return jnp.mean((model(inputs["x"]) - inputs["y"]) ** 2)


def through_the_library(batch: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns two step functions: the Partitioner's, and the same step on flat lists."""
    task = LossTask(Tower, squared_error, Learner(optax.adam, 1e-3))
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1))))
    key, batch = partitioner.key(0), partitioner.global_batch(batch)
    states = [partitioner.init(key), partitioner.init(key)]
    flat, treedef = jax.tree.flatten((states[1], batch, key))
    num_state = len(jax.tree.leaves(states[1]))

    def flat_step(state: list[jax.Array], rest: list[jax.Array]) -> tuple[list, list]:
        state, outputs = partitioner.train_step.function(*treedef.unflatten(state + rest))
        return jax.tree.leaves(state), jax.tree.leaves(outputs)

    flat_step = jax.jit(flat_step, donate_argnums=0)
    lists = [flat[:num_state], flat[num_state:]]

    def library() -> Any:
        states[0], outputs = partitioner.train_step(states[0], batch, key)
        return outputs

    def flat_list() -> Any:
        lists[0], outputs = flat_step(*lists)
        return outputs

    return library, flat_list


def by_hand(batch: Any) -> Callable[[], Any]:
    """Returns a step function with `jax.jit` over flat lists of weights and slots."""
    graphdef, state = nnx.split(Tower(nnx.Rngs(0)))
    weights, treedef = jax.tree.flatten(nnx.to_pure_dict(state))
    optimizer = optax.adam(1e-3)
    slots, slots_treedef = jax.tree.flatten(optimizer.init(weights))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: list, slots: list, batch: Any) -> tuple:
        def loss_of(weights: list) -> jax.Array:
            model = jax.tree.unflatten(jax.tree.structure(state), weights)
            return squared_error(nnx.merge(graphdef, model), batch)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        updates, new = optimizer.update(grads, slots_treedef.unflatten(slots), weights)
        return optax.apply_updates(weights, updates), jax.tree.leaves(new), loss

    lists = [weights, slots]

    def call() -> Any:
        *lists[:], loss = step(*lists, batch)
        return loss

    return call


def through_nnx_jit(batch: Any) -> Callable[[], Any]:
    """Returns a step function with `nnx.jit`, as in Flax's guides."""
    model = Tower(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Tower, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(squared_error)(model, batch)
        optimizer.update(model, grads)
        return loss

    return lambda: step(model, optimizer, batch)


def median_host_times(steps: dict[str, Callable[[], Any]], num_steps: int) -> dict[str, float]:
    """Returns the median seconds until the call to each step function returns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(num_steps):
        # Rotate the order, so that no step always runs after the same step.
        names = list(steps)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.perf_counter()
            outputs = steps[name]()
            times[name].append(time.perf_counter() - start)
            jax.block_until_ready(outputs)
    return {name: statistics.median(result[num_steps // 10 :]) for name, result in times.items()}


def main() -> None:
    """Prints the table."""
    simulate_devices(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_steps", type=int, default=500)
    args = parser.parse_args()
    draw = np.random.default_rng(0).normal
    batch = {name: draw(size=(8, DIMS)).astype(np.float32) for name in "xy"}
    library, flat_list = through_the_library(batch)
    on_device = jax.device_put(batch)
    steps = {
        "Partitioner.train_step": library,
        "jax.jit, flat list, same step": flat_list,
        "jax.jit, flat list, hand-written": by_hand(on_device),
        "nnx.jit": through_nnx_jit(on_device),
    }
    times = median_host_times(steps, args.num_steps)
    base = times["jax.jit, flat list, same step"]
    print(f"{'host time per step':<36}{'us':>8}{'ratio':>8}")
    for name, seconds in times.items():
        print(f"{name:<36}{seconds * 1e6:>8.0f}{seconds / base:>8.2f}")
    ours = times["Partitioner.train_step"]
    print(f"library / flat list: {ours / base:.2f}, the goal is at most {GOAL}")


if __name__ == "__main__":
    main()
