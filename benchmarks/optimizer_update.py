"""Compares the time of the learner's update with that of a bare optax chain.

`python -m benchmarks.optimizer_update` compares `Learner.update` with
`optax.chain(clip_by_global_norm, adamw)` and `apply_updates`, for the weights of a small language
model with unrolled and with stacked layers. Both updates are jitted with a donated state, and take
turns on one device. The script prints the median times, their ratio, and the bytes that XLA
allocates in addition to the arguments.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.core import (
    Learner,
    WeightSpec,
)
from praxis_lite.core.sharding.weight_spec import spec_items
from praxis_tools.explain import hlo

VOCAB, MODEL, HIDDEN, HEADS, LAYERS = 8_192, 384, 1_536, 6, 6  # 13.8 M weights
GOAL = 1.0
LEARNING_RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 1_000)
MAX_NORM = 1.0
PyTree = Any


def weight_specs(is_stacked: bool) -> PyTree:
    """Returns the specs of a language model's weights, with layers unrolled or stacked."""
    attention = (MODEL, HEADS, MODEL // HEADS)
    layer = {
        **{name: {"w": attention} for name in ("query", "key", "value", "post")},
        "ffn_layer1": {"w": (MODEL, HIDDEN), "b": (HIDDEN,)},
        "ffn_layer2": {"w": (HIDDEN, MODEL), "b": (MODEL,)},
        **{name: {"scale": (MODEL,)} for name in ("layer_norm", "ff_layer_norm")},
    }
    stack = ((LAYERS,), (None,)) if is_stacked else ((), ())

    def spec(shape: tuple[int, ...], stack_shape=(), stack_split=()) -> WeightSpec:
        return WeightSpec((*stack_shape, *shape), jnp.dtype("float32"), None, stack_split)

    def layers() -> PyTree:
        return jax.tree.map(lambda x: spec(x, *stack), layer, is_leaf=lambda x: type(x) is tuple)

    blocks = {"blocks": layers()} if is_stacked else {f"layer_{i}": layers() for i in range(LAYERS)}
    return {**blocks, "softmax": {"w": spec((MODEL, VOCAB))}, "final_ln": {"scale": spec((MODEL,))}}


def random_tree(specs: PyTree, seed: int) -> PyTree:
    """Returns a random array for each weight; the same on every call."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: rng.normal(scale=0.02, size=spec.shape).astype(np.float32),
        specs,
        is_leaf=lambda x: isinstance(x, WeightSpec),
    )


class Update:
    """A compiled update and its state; each call is timed."""

    def __init__(self, update: Any, params: PyTree, opt_states: PyTree, grads: PyTree):
        step = jax.jit(update, donate_argnums=(0, 1))
        self._state, self._grads = jax.tree.map(jnp.asarray, (params, opt_states)), grads
        self.compiled = step.lower(*self._state, grads).compile()
        self.times: list[float] = []

    def run(self) -> None:
        """Runs one update."""
        start = time.perf_counter()
        self._state = self.compiled(*self._state, self._grads)
        jax.block_until_ready(self._state)
        self.times.append(time.perf_counter() - start)

    def params(self) -> PyTree:
        return self._state[0]


def compare(is_stacked: bool, num_steps: int) -> tuple[Update, Update]:
    """Alternates the learner's update and optax's update for `num_steps` steps; returns both."""
    specs = weight_specs(is_stacked)
    params, grads = random_tree(specs, 1), jax.tree.map(jnp.asarray, random_tree(specs, 2))
    learner = Learner(optax.adamw, LEARNING_RATE, clip_gradient_norm_to_value=MAX_NORM)
    bound = learner.bind(specs)

    def learner_update(params: PyTree, opt_states: PyTree, grads: PyTree) -> tuple:
        return bound.update(grads, opt_states, params, jnp.float32(1.0))[:2]

    bare = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))

    def bare_update(params: PyTree, opt_state: PyTree, grads: PyTree) -> tuple:
        updates, opt_state = bare.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    ours = Update(learner_update, params, bound.init(params), grads)
    theirs = Update(bare_update, params, bare.init(params), grads)
    for index in range(num_steps):
        # Alternate the order, so that neither always runs second.
        for update in (ours, theirs) if index % 2 else (theirs, ours):
            update.run()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        ours.params(),
        theirs.params(),
    )
    return ours, theirs


def main() -> None:
    """Prints the times for unrolled and for stacked layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_steps", type=int, default=100)
    args = parser.parse_args()
    head = ("layers", "weights", "Learner ms", "optax ms", "ratio", "goal", "temp MB", "optax MB")
    print("".join(f"{name:>12}" for name in head))
    for name, is_stacked in (("unrolled", False), ("stacked", True)):
        updates = compare(is_stacked, args.num_steps)
        warm = args.num_steps // 10
        ours, theirs = (1e3 * statistics.median(u.times[warm:]) for u in updates)
        ratio = statistics.median(
            a / b for a, b in zip(*(u.times[warm:] for u in updates), strict=True)
        )
        temp = [hlo.memory_per_device(u.compiled).temp / 1e6 for u in updates]
        num_weights = sum(np.prod(s.shape) for _, s in spec_items(weight_specs(is_stacked)))
        figures = f"{num_weights:>12,}{ours:>12.2f}{theirs:>12.2f}{ratio:>12.3f}{GOAL:>12.2f}"
        print(f"{name:>12}{figures}{temp[0]:>12.2f}{temp[1]:>12.2f}")


if __name__ == "__main__":
    main()
