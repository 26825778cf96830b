"""Computes gradients and metrics for a batch, optionally accumulated over microbatches."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.batch_sharding import InputsSplitMapping, num_rows_of
from praxis_lite.core.sharding.devices.axis_types import (
    is_type_error,
    is_typed,
    note_untyped,
    reduce_partial,
    type_spec,
    with_unreduced_gradient,
    zeros_unreduced,
)
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.memory_spaces import to_device
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.core.task import WeightedScalars

__all__ = ("LossFn", "value_and_grad")

PyTree = Any
Batch = Mapping[str, jax.Array]
# (fixed, params, non_trainable, inputs, key) -> (differentiated value, (metrics, new
# non_trainable))
LossFn = Callable[
    [PyTree, PyTree, PyTree, Batch, jax.Array], tuple[jax.Array, tuple[WeightedScalars, PyTree]]
]
# The type of `value_and_grad` below and of functions that replace it.
ValueAndGrad = Callable[..., tuple[WeightedScalars, PyTree, PyTree]]


def value_and_grad(
    loss_fn: LossFn,
    fixed: PyTree,
    params: PyTree,
    non_trainable: PyTree,
    inputs: Batch,
    key: jax.Array,
    *,
    accumulation_steps: int = 1,
    inputs_split_mapping: InputsSplitMapping = None,
    lay_out: Callable[[PyTree], PyTree] = lambda grads: grads,
) -> tuple[WeightedScalars, PyTree, PyTree]:
    """Returns (metrics, new non_trainable, float32 gradients w.r.t. params) for a batch.

    If the loss is a weighted mean over rows, the result does not depend on the number of
    microbatches, up to rounding: gradients are multiplied by the weight of the "loss" metric,
    summed in float32, and divided once by the total weight. Metrics are weighted means, too.
    Microbatches with weight 0 are ignored, even if they contain NaN. Losses that are not sums over
    rows do depend on the number of microbatches: a router's load-balancing loss becomes the
    weighted mean of the microbatches' losses, and batch norm uses each microbatch's statistics.

    Peak memory includes the activations of one microbatch and a float32 sum of the gradients.

    Args:
      loss_fn: Takes the next five arguments, with `inputs` replaced by a microbatch.
      fixed: Values that are not differentiated: `{"frozen": weights, "loss_scale": scalar}`.
      params: Weights to differentiate with respect to.
      non_trainable: Variables that each microbatch updates for the next microbatch.
      inputs: Arrays [B, ...] and scalars. Microbatch i contains the rows r with r % N == i, and
        all scalars.
      key: PRNG key, into which the index of each microbatch is folded.
      accumulation_steps: Number N of microbatches. If it is 1, there is no loop, and `loss_fn`
        receives `key` unchanged.
      inputs_split_mapping: Maps an array's rank to its split dims, for batches and microbatches.
      lay_out: Constrains gradients to the layout in which they are summed.

    Raises:
      ConfigError: B is not divisible by N. Raised while tracing.
    """
    grad_fn = jax.value_and_grad(loss_fn, argnums=1, has_aux=True)
    if accumulation_steps == 1:
        (_, (metrics, non_trainable)), grads = grad_fn(fixed, params, non_trainable, inputs, key)
        return metrics, non_trainable, jax.tree.map(_as_float32, grads)

    def over_microbatches(
        grad_fn: Callable[..., Any],
        params: PyTree,
        zeros: PyTree,
        add: Callable[[PyTree, PyTree, jax.Array], PyTree],
    ) -> tuple[WeightedScalars, PyTree, PyTree]:
        """Sums gradients in a scan; `add` takes (sums, gradients, weight of a microbatch)."""

        def step(
            carry: tuple[PyTree, PyTree], x: tuple[Batch, jax.Array]
        ) -> tuple[tuple[PyTree, PyTree], WeightedScalars]:
            grad_sums, old = carry
            microbatch, index = x
            (_, (metrics, new)), grads = grad_fn(
                fixed,
                params,
                old,
                constrain_rows(microbatch, inputs_split_mapping),
                jax.random.fold_in(key, index),
            )
            weight = metrics["loss"][1]
            new = jax.tree.map(lambda n, o: jnp.where(weight != 0, n, o), new, old)
            return (add(grad_sums, grads, weight), new), metrics

        xs = cut(inputs, accumulation_steps), jnp.arange(accumulation_steps)
        (grad_sums, new), metrics = jax.lax.scan(step, (zeros, non_trainable), xs)
        metrics = {name: weighted_mean(*pairs) for name, pairs in metrics.items()}
        total = metrics["loss"][1]
        divisor = jnp.where(total == 0, 1.0, total)
        return metrics, new, jax.tree.map(lambda g: reduce_partial(g) / divisor, grad_sums)

    # Over Explicit axes, sum over devices once, after all microbatches. If JAX cannot type this,
    # sum in every microbatch, as over Auto axes.
    if axes := _row_axes(inputs):
        try:
            return over_microbatches(*_reduced_once(loss_fn, params, axes))
        except Exception as error:
            if not is_type_error(error):
                raise
            reason = str(error).strip().splitlines()[0]
            note_untyped("summing gradients over devices once for all microbatches", reason)

    def add(grad_sums: PyTree, grads: PyTree, weight: jax.Array) -> PyTree:
        # A select, because a product with a weight of 0 would keep NaN.
        return jax.tree.map(
            lambda total, g: total + jnp.where(weight != 0, g.astype(jnp.float32) * weight, 0.0),
            grad_sums,
            lay_out(to_device(grads)),
        )

    zeros = lay_out(jax.tree.map(lambda w: jnp.zeros_like(to_device(w), jnp.float32), params))
    return over_microbatches(grad_fn, params, zeros, add)


def _row_axes(inputs: Batch) -> tuple[str, ...]:
    """Returns the Explicit axes that split the rows of a batch according to its array types."""
    if not is_typed():
        return ()
    rows = (type_spec(x)[0] for x in jax.tree.leaves(inputs) if x.ndim)
    return tuple(dict.fromkeys(axis for entry in rows for axis in axes_of(entry)))


def _reduced_once(
    loss_fn: LossFn, params: PyTree, axes: tuple[str, ...]
) -> tuple[Callable[..., Any], PyTree, PyTree, Callable[..., PyTree]]:
    """Returns (grad_fn, params, zeros, add) for gradients that are reduced over `axes` only once.

    Each device accumulates partial sums, which are reduced after the loop over microbatches.
    """
    # The gradients of these weights are partial sums on each device ("unreduced"), unless a weight
    # is split over one of `axes`.
    params = jax.tree.map(lambda w: with_unreduced_gradient(to_device(w), axes), params)

    def weighted(
        fixed: PyTree, params: PyTree, *args: Any
    ) -> tuple[jax.Array, tuple[WeightedScalars, PyTree]]:
        loss, (metrics, new) = loss_fn(fixed, params, *args)
        # Weight the loss, not the gradients: JAX has no type for a product of unreduced arrays.
        weight = jax.lax.stop_gradient(metrics["loss"][1])
        return loss * weight.astype(loss.dtype), (metrics, new)

    def add(grad_sums: PyTree, grads: PyTree, weight: jax.Array) -> PyTree:
        return jax.lax.cond(
            weight != 0,
            lambda: jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grad_sums, grads),
            lambda: grad_sums,
        )

    grad_fn = jax.value_and_grad(weighted, argnums=1, has_aux=True)
    zeros = jax.tree.map(lambda w: zeros_unreduced(w, jnp.float32), params)
    return grad_fn, params, zeros, add


def _as_float32(g: jax.Array) -> jax.Array:
    return g if g.dtype == jnp.float32 else to_device(g).astype(jnp.float32)


def weighted_mean(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted mean over the first dim, and the total weight.

    If all weights are 0, the mean is unweighted.

    Args:
      values: Values [N, ...].
      weights: Weights [N].
    """
    weights = weights.astype(jnp.float32)
    total = jnp.sum(weights)
    broadcast = weights.reshape(-1, *[1] * (values.ndim - 1))
    weighted_sum = jnp.sum(jnp.where(broadcast != 0, values * broadcast, 0.0), axis=0)
    mean = weighted_sum / jnp.where(total == 0, 1.0, total)
    return jnp.where(total == 0, jnp.mean(values, axis=0), mean), total


def cut(inputs: Batch, num_microbatches: int) -> Batch:
    """Splits inputs into N microbatches: [B, ...] -> [N, B / N, ...]; scalars -> [N].

    Each device stores a block of consecutive rows. Assigning row r to microbatch r % N gives each
    device the same number of rows in every microbatch, so no rows move between devices.
    """
    num_rows = num_rows_of(inputs)
    if num_rows % num_microbatches:
        divisors = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
        raise ConfigError(
            f"Learner.gradient_accumulation_steps is {num_microbatches}, but the training batch "
            f"size {num_rows} is not divisible by {num_microbatches}. Make the batch size a "
            f"multiple of {num_microbatches}, or set gradient_accumulation_steps to one of "
            f"{divisors}."
        )
    shape = (num_rows // num_microbatches, num_microbatches)

    def split(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return jnp.broadcast_to(x, (num_microbatches,))
        return jnp.swapaxes(x.reshape(shape + x.shape[1:]), 0, 1)

    microbatches: Batch = jax.tree.map(split, inputs)
    return microbatches


def constrain_rows(microbatch: Batch, inputs_split_mapping: InputsSplitMapping) -> Batch:
    """Constrains a microbatch to be sharded like the complete batch.

    Otherwise XLA would replicate microbatches that do not split evenly over the devices.
    """
    axis_names = jax.sharding.get_abstract_mesh().axis_names
    mapping = inputs_split_mapping or {}

    def constrain_leaf(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        split = mapping.get(f"map_{x.ndim}d")
        return constrain(x, (axis_names,) if split is None else split)

    microbatch = jax.tree.map(constrain_leaf, microbatch)
    return microbatch
