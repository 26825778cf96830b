"""Trains and decodes a language model on one device without the library's learner and steps.

This is the independent reference for a Partitioner: it uses plain JAX and optax, updates stacked
layers one by one, and decodes with a full forward pass per token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Batch = Mapping[str, np.ndarray]


def split_model(build: Callable[..., nnx.Module]) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the graph definition of `build(rngs=)` and its initial weights."""
    graphdef = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))[0]
    draw = jax.jit(lambda key: nnx.split(build(rngs=nnx.Rngs(key)))[1])
    return graphdef, draw(jax.random.key(0))


def unstacked(weights: nnx.State) -> dict[str, jax.Array]:
    """Returns the weights by name, with a separate array for each layer of a scanned stack."""
    flat = {}
    for path, x in jax.tree_util.tree_flatten_with_path(weights)[0]:
        name = jax.tree_util.keystr(path)
        if "blocks" not in name:
            flat[name] = x
        else:
            flat.update({f"{name}[{i}]": x[i] for i in range(x.shape[0])})
    return flat


def restacked(flat: Mapping[str, jax.Array], like: nnx.State) -> nnx.State:
    """Stacks the weights again; the inverse of `unstacked`."""

    def leaf(path: tuple, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "blocks" not in name:
            return flat[name]
        return jnp.stack([flat[f"{name}[{i}]"] for i in range(x.shape[0])])

    return jax.tree_util.tree_map_with_path(leaf, like)


def mean_loss(model: nnx.Module, batch: Batch) -> jax.Array:
    """Returns the mean loss in nats over tokens with weight 1."""
    logits, _ = model(batch["ids"])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1)
    return -jnp.sum(chosen[..., 0] * batch["weights"]) / jnp.sum(batch["weights"])


def train(
    build: Callable[..., nnx.Module],
    optimizer: optax.GradientTransformation,
    max_norm: float,
    batches: Sequence[Batch],
) -> tuple[nnx.State, list[float], list[float]]:
    """Returns the final weights, the losses and the gradient norms of one step per batch."""
    graphdef, weights = split_model(build)

    @jax.jit
    def step(weights: nnx.State, slots: Any, batch: Batch) -> tuple:
        loss_fn = jax.value_and_grad(lambda w: mean_loss(nnx.merge(graphdef, w), batch))
        loss, grads = loss_fn(weights)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, max_norm / norm), grads)
        flat = unstacked(weights)
        updates, slots = optimizer.update(unstacked(grads), slots, flat)
        return restacked(optax.apply_updates(flat, updates), weights), slots, loss, norm

    slots, losses, norms = jax.jit(optimizer.init)(unstacked(weights)), [], []
    for batch in batches:
        weights, slots, loss, norm = step(weights, slots, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return weights, losses, norms


class PlainDecoder:
    """Decodes by full forward passes over the sequences, without a cache."""

    def __init__(self, build: Callable[..., nnx.Module], weights: nnx.State, length: int):
        graphdef = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))[0]
        self._weights, self._length = weights, length
        self._log_probs = jax.jit(
            lambda weights, ids: jax.nn.log_softmax(nnx.merge(graphdef, weights)(ids)[0])
        )

    def next_log_probs(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns the log-probabilities [V] of the token after `tokens`."""
        ids = np.zeros((1, self._length), np.int32)
        ids[0, : len(tokens)] = tokens
        return np.asarray(self._log_probs(self._weights, ids))[0, len(tokens) - 1]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], float, float]:
        """Returns the new tokens, their total log-probability, and the smallest top-2 margin."""
        tokens, log_prob, margin = [int(t) for t in prompt], 0.0, np.inf
        for _ in range(num_tokens):
            log_probs = self.next_log_probs(tokens)
            second, first = np.sort(log_probs)[-2:]
            log_prob, margin = log_prob + float(first), min(margin, float(first - second))
            tokens.append(int(np.argmax(log_probs)))
        return tokens[len(prompt) :], log_prob, margin
