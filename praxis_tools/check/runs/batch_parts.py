"""Computes gradients on a single device, one part of the batch after another.

This is the reference for steps whose results depend on how the batch is divided into parts. The
parts are either the rows of each device (ExplicitCollectives) or microbatches.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.partitioner import accumulation, steps
from praxis_lite.core.partitioner.gradient_strategy import GradientFunctions
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.core.task import Task, WeightedScalars
from praxis_lite.layers.stacking.pipelining.split_model import in_one_microbatch

PyTree = Any


def microbatches_in_turn(
    num_microbatches: Callable[[PyTree, int], int] | None,
) -> GradientFunctions:
    """Returns a strategy for a single device that processes N microbatches one after another.

    Microbatch r consists of the rows r, r + N, r + 2 N, ... Gradients are averaged with the
    weights of "loss".

    Args:
      num_microbatches: `GradientFunctions.num_microbatches` of a pipeline strategy, whose
        microbatches are the parts and are not split further. None for gradient accumulation.
    """

    def value_and_grad(*args: Any, **settings: Any) -> tuple[Any, PyTree, PyTree]:
        num_parts, inputs = settings["accumulation_steps"], args[4]
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if num_microbatches is not None:
            num_parts = num_microbatches(inputs, num_parts)
            context = in_one_microbatch()
        with context:
            return _value_and_grad(*args, num_parts=num_parts, is_strided=True, **settings)

    return GradientFunctions(value_and_grad)


def devices_in_turn(num_parts: int) -> GradientFunctions:
    """Returns a strategy for a single device that processes the rows of N devices in turn.

    Part d is the d-th block of rows, padded with copies of the first row with weight 0. Its random
    key is the step's key with d folded in. ExplicitCollectives produces the same results on N
    devices.
    """

    return GradientFunctions(
        functools.partial(_value_and_grad, num_parts=num_parts, is_strided=False),
        functools.partial(_evaluate, num_parts=num_parts),
    )


def _value_and_grad(
    loss_fn: accumulation.LossFn,
    fixed: PyTree,
    params: PyTree,
    non_trainable: PyTree,
    inputs: Mapping[str, jax.Array],
    key: jax.Array,
    *,
    accumulation_steps: int,
    num_parts: int,
    is_strided: bool,
    inputs_split_mapping: Any = None,
    lay_out: Any = None,
) -> tuple[Any, PyTree, PyTree]:
    """Computes the gradients of each part and averages them, like `accumulation.value_and_grad`.

    Each part is weighted by its loss weight, and parts with weight 0 are ignored. Strided parts are
    microbatches, each of which continues from the variables of the previous microbatch. Each block
    contains the rows of one device. All blocks start from the same variables, and the changes of
    these variables are averaged.
    """
    del inputs_split_mapping, lay_out  # There is only one device.
    parts = _split_rows(inputs, num_parts, is_strided, accumulation_steps)
    total_weight: jax.Array | float = 0.0
    by_part, grad_sums, changes = [], None, None
    # Gradient accumulation with a single part does not fold its key.
    is_single_part = is_strided and num_parts == 1
    state = non_trainable
    for index, part in enumerate(parts):
        metrics, new, grads = accumulation.value_and_grad(
            loss_fn,
            fixed,
            params,
            state,
            part,
            key if is_single_part else jax.random.fold_in(key, index),
            accumulation_steps=1 if is_strided else accumulation_steps,
        )
        metrics = _with_row_weights(metrics, part)
        by_part.append(metrics)
        weight = metrics["loss"][1]
        counts = weight != 0
        total_weight = total_weight + weight
        scale = lambda x, counts=counts, weight=weight: jnp.where(counts, x * weight, 0.0)  # noqa: E731
        grads = jax.tree.map(scale, grads)
        grad_sums = grads if grad_sums is None else jax.tree.map(jnp.add, grad_sums, grads)
        if is_strided:  # Each microbatch continues from the previous microbatch's variables.
            state = jax.tree.map(lambda n, o, c=counts: jnp.where(c, n, o), new, state)
        else:  # All devices start from the same variables.
            change = jax.tree.map(functools.partial(_change, counts, weight), new, non_trainable)
            changes = change if changes is None else jax.tree.map(_add_change, changes, change)
    divisor = jnp.where(total_weight == 0, 1.0, total_weight)
    if not is_strided:
        state = jax.tree.map(
            lambda old, change: (
                (old + change / divisor).astype(old.dtype)
                if jnp.issubdtype(old.dtype, jnp.inexact)
                else change
            ),
            non_trainable,
            changes,
        )
    return _means(by_part), state, jax.tree.map(lambda g: g / divisor, grad_sums)


def _with_row_weights(metrics: WeightedScalars, part: Mapping[str, jax.Array]) -> WeightedScalars:
    """Returns the metrics of a part, with weight 0 if the part only contains padding rows."""
    has_rows = jnp.any(part["weights"] != 0) if "weights" in part else True
    return {
        name: (value, jnp.where(has_rows, jnp.asarray(weight, jnp.float32), 0.0))
        for name, (value, weight) in metrics.items()
    }


def _means(by_part: Sequence[WeightedScalars]) -> WeightedScalars:
    """Returns the weighted mean and the sum of weights of each metric."""
    means = {}
    for name in by_part[0]:
        pairs = [metrics[name] for metrics in by_part]
        total = functools.reduce(jnp.add, [weight for _, weight in pairs])
        scaled = functools.reduce(
            jnp.add, [jnp.where(weight != 0, value * weight, 0.0) for value, weight in pairs]
        )
        means[name] = scaled / jnp.where(total == 0, 1.0, total), total
    return means


def _change(counts: Any, weight: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return jnp.where(counts, new, old)
    return jnp.where(counts & (new != old), (new - old) * weight, 0.0)


def _add_change(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.maximum(a, b)


def _evaluate(
    task: Task,
    mdl_vars: PyTree,
    inputs: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    *,
    num_parts: int,
) -> tuple[Any, Any]:
    key, by_part, outputs = jax.random.key(0) if key is None else key, [], []
    num_rows = num_rows_of(inputs)
    for index, part in enumerate(_split_rows(inputs, num_parts, False, 1)):
        metrics, examples = steps.eval_step(task, mdl_vars, part, jax.random.fold_in(key, index))
        by_part.append(_with_row_weights(metrics, part))
        outputs.append(examples)
    examples = {name: jnp.concatenate([x[name] for x in outputs])[:num_rows] for name in outputs[0]}
    return _means(by_part), examples


def _split_rows(
    inputs: Mapping[str, jax.Array], num_parts: int, is_strided: bool, accumulation_steps: int
) -> list[dict[str, jax.Array]]:
    """Splits a batch into strided parts, or into blocks that are padded with zero-weight rows."""
    num_rows, arrays = num_rows_of(inputs), dict(inputs)
    if is_strided:
        return [
            jax.tree.map(lambda x, i=i: x[i::num_parts] if x.ndim else x, arrays)
            for i in range(num_parts)
        ]
    missing = -num_rows % (num_parts * accumulation_steps)
    # Padding rows repeat the first row, so that the model sees valid values.
    if missing:
        arrays = jax.tree.map(
            lambda x: jnp.concatenate([x, *[x[:1]] * missing]) if x.ndim else x, arrays
        )
        arrays["weights"] = arrays["weights"].at[num_rows:].set(0.0)
    size = (num_rows + missing) // num_parts
    return [
        jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size] if x.ndim else x, arrays)
        for i in range(num_parts)
    ]
