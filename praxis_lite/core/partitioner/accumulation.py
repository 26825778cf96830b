"""Gradients and metrics of a batch, made whole or a micro-batch at a time: the same numbers."""

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
# (fixed, params, non_trainable, inputs, key) -> (what is differentiated, (metrics, new
# non_trainable))
LossFn = Callable[
    [PyTree, PyTree, PyTree, Batch, jax.Array], tuple[jax.Array, tuple[WeightedScalars, PyTree]]
]
# `value_and_grad` below, or another function of the same arguments.
ValueAndGrad = Callable[..., tuple[WeightedScalars, PyTree, PyTree]]


def value_and_grad(
    loss_fn: LossFn,
    fixed: PyTree,
    params: PyTree,
    non_trainable: PyTree,
    inputs: Batch,
    key: jax.Array,
    *,
    num_micro_batches: int = 1,
    inputs_split_mapping: InputsSplitMapping = None,
    lay_out: Callable[[PyTree], PyTree] = lambda grads: grads,
) -> tuple[WeightedScalars, PyTree, PyTree]:
    """Returns (metrics, new non_trainable, float32 gradients of params) of a whole batch.

    Where the loss is a weighted mean over rows, any number of micro-batches gives what one batch
    does, to rounding: gradients are summed in float32, each times the "loss" metric's weight, and
    divided by the sum of the weights once; metrics are weighted means likewise. A micro-batch of
    weight 0 counts for nothing, even if its values are NaN. A loss that is not a sum over rows is
    another number than that of the whole batch: a router's load-balancing loss is the weighted
    mean of those of the micro-batches, batch norm takes the statistics of each.

    Activations are those of one micro-batch at a time; besides there is a float32 sum of gradients.

    Args:
      loss_fn: of what follows, in this order, for the whole batch or a micro-batch.
      fixed: what no gradient is taken of: `{"frozen": weights, "loss_scale": scalar}`.
      params: the weights to differentiate by.
      non_trainable: handed from micro-batch to micro-batch, in order.
      inputs: arrays [B, ...], cut so that row r is in micro-batch r % N; scalars go to each whole.
      key: each micro-batch gets its own, folded with its index.
      num_micro_batches: N. With 1 there is no loop, and the key goes to loss_fn as it is.
      inputs_split_mapping: by which the rows of each micro-batch are split, as the batch's are.
      lay_out: returns gradients with the layout stated in which they are summed.

    Raises:
      ConfigError: N does not divide B; while tracing, before anything compiles.
    """
    grad_fn = jax.value_and_grad(loss_fn, argnums=1, has_aux=True)
    if num_micro_batches == 1:
        (_, (metrics, non_trainable)), grads = grad_fn(fixed, params, non_trainable, inputs, key)
        return metrics, non_trainable, jax.tree.map(_as_float32, grads)

    if axes := _axes_of_rows(inputs):
        try:
            return _summed_once(
                loss_fn, fixed, params, non_trainable, inputs, key, axes,
                num_micro_batches=num_micro_batches, inputs_split_mapping=inputs_split_mapping,
            )
        except Exception as error:
            if not is_type_error(error):
                raise
            reason = str(error).strip().splitlines()[0]
            note_untyped("gradients' sum over devices, once for all micro-batches", reason)

    def add(carry: tuple[PyTree, PyTree], x: tuple[Batch, jax.Array]) -> tuple:
        grad_sums, non_trainable = carry
        micro_batch, index = x
        (_, (metrics, new)), grads = grad_fn(
            fixed, params, non_trainable, spread(micro_batch, inputs_split_mapping),
            jax.random.fold_in(key, index),
        )
        weight = metrics["loss"][1]
        counts = weight != 0
        grad_sums = jax.tree.map(
            lambda total, g: total + jnp.where(counts, g.astype(jnp.float32) * weight, 0.0),
            grad_sums, lay_out(to_device(grads)),
        )
        new = jax.tree.map(lambda n, o: jnp.where(counts, n, o), new, non_trainable)
        return (grad_sums, new), metrics

    zeros = lay_out(jax.tree.map(lambda w: jnp.zeros_like(to_device(w), jnp.float32), params))
    micro_batches = cut(inputs, num_micro_batches)
    (grad_sums, non_trainable), metrics = jax.lax.scan(
        add, (zeros, non_trainable), (micro_batches, jnp.arange(num_micro_batches))
    )
    return _means(metrics, non_trainable, grad_sums)


def _means(metrics: PyTree, non_trainable: PyTree, grad_sums: PyTree) -> tuple:
    """Returns the results of `value_and_grad`, of metrics [N] and sums of weighted gradients."""
    metrics = {name: weighted_mean(*pairs) for name, pairs in metrics.items()}
    total = metrics["loss"][1]
    divisor = jnp.where(total == 0, 1.0, total)
    return metrics, non_trainable, jax.tree.map(lambda g: g / divisor, grad_sums)


def _axes_of_rows(inputs: Batch) -> tuple[str, ...]:
    """Returns the Explicit axes that the types of a batch split its rows over."""
    if not is_typed():
        return ()
    rows = (type_spec(x)[0] for x in jax.tree.leaves(inputs) if x.ndim)
    return tuple(dict.fromkeys(axis for entry in rows for axis in axes_of(entry)))


def _summed_once(
    loss_fn: LossFn, fixed: PyTree, params: PyTree, non_trainable: PyTree, inputs: Batch,
    key: jax.Array, axes: tuple[str, ...], *, num_micro_batches: int,
    inputs_split_mapping: InputsSplitMapping,
) -> tuple:
    """Returns the results of `value_and_grad` over Explicit axes.

    Each device adds up its terms of gradients, which are summed over `axes` once, after the loop.
    """
    params = jax.tree.map(lambda w: with_unreduced_gradient(to_device(w), axes), params)

    def weighted(fixed: PyTree, params: PyTree, *args: Any) -> tuple[jax.Array, tuple]:
        loss, (metrics, new) = loss_fn(fixed, params, *args)
        # Here, for JAX has no type of a product with terms.
        weight = jax.lax.stop_gradient(metrics["loss"][1])
        return loss * weight.astype(loss.dtype), (metrics, new)

    grad_fn = jax.value_and_grad(weighted, argnums=1, has_aux=True)

    def add(carry: tuple[PyTree, PyTree], x: tuple[Batch, jax.Array]) -> tuple:
        grad_sums, old = carry
        micro_batch, index = x
        (_, (metrics, new)), grads = grad_fn(
            fixed, params, old, spread(micro_batch, inputs_split_mapping),
            jax.random.fold_in(key, index),
        )
        counts = metrics["loss"][1] != 0
        grad_sums = jax.lax.cond(
            counts,
            lambda: jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grad_sums, grads),
            lambda: grad_sums,
        )
        return (grad_sums, jax.tree.map(lambda n, o: jnp.where(counts, n, o), new, old)), metrics

    zeros = jax.tree.map(lambda w: zeros_unreduced(w, jnp.float32), params)
    (grad_sums, new), metrics = jax.lax.scan(
        add, (zeros, non_trainable), (cut(inputs, num_micro_batches), jnp.arange(num_micro_batches))
    )
    return _means(metrics, new, jax.tree.map(reduce_partial, grad_sums))


def _as_float32(g: jax.Array) -> jax.Array:
    return g if g.dtype == jnp.float32 else to_device(g).astype(jnp.float32)


def weighted_mean(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean of [N, ...] values, and its weight; if all weights are 0, the plain mean."""
    weights = weights.astype(jnp.float32)
    total = jnp.sum(weights)
    of_values = weights.reshape(-1, *[1] * (values.ndim - 1))
    weighted_sum = jnp.sum(jnp.where(of_values != 0, values * of_values, 0.0), axis=0)
    mean = weighted_sum / jnp.where(total == 0, 1.0, total)
    return jnp.where(total == 0, jnp.mean(values, axis=0), mean), total


def cut(inputs: Batch, num_micro_batches: int) -> Batch:
    """Returns the inputs by micro-batch: [B, ...] -> [N, B / N, ...], scalars -> [N].

    Devices hold rows in blocks. Row r goes to micro-batch r % N, so that each device has as
    many rows of every micro-batch, and keeps them: no data moves.
    """
    num_rows = num_rows_of(inputs)
    if num_rows % num_micro_batches:
        divisors = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
        raise ConfigError(
            f"Learner.gradient_accumulation_steps is {num_micro_batches}, which does not divide "
            f"the {num_rows} rows of a batch. Make the batch size of the training data a multiple "
            f"of {num_micro_batches}, or gradient_accumulation_steps one of {divisors}."
        )
    shape = (num_rows // num_micro_batches, num_micro_batches)

    def cut_leaf(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return jnp.broadcast_to(x, (num_micro_batches,))
        return jnp.swapaxes(x.reshape(shape + x.shape[1:]), 0, 1)

    return jax.tree.map(cut_leaf, inputs)


def spread(micro_batch: Batch, inputs_split_mapping: InputsSplitMapping) -> Batch:
    """Returns a micro-batch with its layout stated: rows split as those of a whole batch.

    Without it XLA would keep uneven rows on every device, and compute everything there.
    """
    axis_names = jax.sharding.get_abstract_mesh().axis_names
    mapping = inputs_split_mapping or {}

    def spread_leaf(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        split = mapping.get(f"map_{x.ndim}d")
        return constrain(x, (axis_names,) if split is None else split)

    return jax.tree.map(spread_leaf, micro_batch)
