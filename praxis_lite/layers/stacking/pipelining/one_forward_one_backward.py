"""OneForwardOneBackward: trains a model that contains a Pipeline with the 1F1B schedule."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.core.collectives.padding_rows import (
    num_missing_rows,
    num_weights_of,
    with_padding_rows,
)
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.learner.weight_groups import WeightGroups
from praxis_lite.core.partitioner import accumulation
from praxis_lite.core.partitioner.gradient_strategy import GradientFunctions
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.core.sharding.devices.axis_types import note_untyped, type_spec, untyped
from praxis_lite.core.task import Task, WeightedScalars
from praxis_lite.layers.base.variables import assigned_values
from praxis_lite.layers.stacking.pipelines import Pipeline
from praxis_lite.layers.stacking.pipelining.interleaved_ticks import InterleavedTicks
from praxis_lite.layers.stacking.pipelining.microbatches import num_microbatches_of
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import InterleavedSchedule
from praxis_lite.layers.stacking.pipelining.split_model import SplitModel, in_one_microbatch

PyTree = Any


@dataclasses.dataclass(frozen=True)
class OneForwardOneBackward:
    """Computes gradients by 1F1B for a model that contains one Pipeline (arXiv:2104.04473).

    The backward pass of a microbatch begins as soon as the microbatch has left the last stage, so a
    stage stores the inputs of 2 R S - 1 microbatches, regardless of M. The parts of the model
    before and after the Pipeline, such as the embedding and the loss, run per microbatch within the
    ticks. With `Pipeline.split_backward`, weight gradients have no bubbles (ZB-H1,
    arXiv:2401.10241).

    Gradient accumulation over the same microbatches gives the same results, and is used instead on
    meshes without the stage axis. If the loss is a weighted mean over examples, a pass over the
    complete batch gives the same results, too.
    """

    def on(
        self, task: Task, mesh: Mesh, layout: StateLayout, groups: WeightGroups
    ) -> GradientFunctions:
        """Returns the functions that compute gradients and metrics for a task on a mesh.

        Raises:
          ConfigError: The model does not contain exactly one Pipeline, or the model contains
            variables that each pass updates.
        """
        pipeline = _pipeline_of(task)
        return GradientFunctions(
            value_and_grad=functools.partial(_value_and_grad, pipeline),
            check_rows=functools.partial(_num_missing_rows, pipeline),
            num_microbatches=functools.partial(_num_microbatches, pipeline),
            sums_in_a_loop=True,
        )


def _pipeline_of(task: Task) -> Pipeline:
    module = task.model.abstract_module()
    modules = [] if module is None else [node for _, node in nnx.compat.iter_modules(module)]
    pipelines = [node for node in modules if isinstance(node, Pipeline)]
    if len(pipelines) != 1:
        raise ConfigError(
            "OneForwardOneBackward requires a model with exactly one Pipeline, but the number of "
            f"Pipelines is {len(pipelines)}. Make the model's stack a Pipeline, or omit the "
            "Partitioner's `gradients`."
        )
    updated = {
        str(path[-1])
        for path, node in nnx.compat.iter_graph(module)
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param | nnx.Intermediate)
    }
    if updated:
        raise ConfigError(
            "OneForwardOneBackward does not support variables that each pass updates, such as "
            "batch statistics, because a stage runs before the weights of its microbatches are "
            f"known. The model contains {', '.join(sorted(updated))}. Omit the Partitioner's "
            "`gradients`; the default supports such variables."
        )
    return pipelines[0]


def _num_microbatches(pipeline: Pipeline, inputs: PyTree, accumulation_steps: int) -> int:
    """Returns the number of microbatches in a batch, summed over the accumulation steps."""
    num_rows = -(-num_rows_of(inputs) // accumulation_steps)
    num_microbatches = num_microbatches_of(
        num_rows, pipeline.num_microbatches, pipeline.microbatch_size
    )
    return num_microbatches * accumulation_steps


def _num_missing_rows(pipeline: Pipeline, inputs: PyTree, accumulation_steps: int) -> int:
    """Returns the number of padding rows needed to split a batch into equal microbatches."""
    num_microbatches = _num_microbatches(pipeline, inputs, accumulation_steps)
    num_rows = num_rows_of(inputs)
    if num_rows % num_microbatches and assigned_values(pipeline.blocks):
        raise ConfigError(
            f"The batch size {num_rows} is not divisible by the {num_microbatches} microbatches. "
            "Padding rows cannot be added, because the Pipeline's blocks assign variables, which "
            f"these rows would affect. Make the batch size a multiple of {num_microbatches}."
        )
    return num_missing_rows(inputs, num_microbatches, f"{num_microbatches} microbatches")


def _value_and_grad(
    pipeline: Pipeline, loss_fn: accumulation.LossFn, *args: Any, **settings: Any
) -> tuple[WeightedScalars, PyTree, PyTree]:
    """Implements `accumulation.value_and_grad` over all microbatches.

    The ticks run with Auto axes, because JAX cannot infer the types of a stage over Explicit axes.
    """
    _, params, non_trainable, *_ = args

    def types(results: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
        replicated = jax.tree.map(lambda x: PartitionSpec(), results[0])
        return replicated, *jax.tree.map(type_spec, (non_trainable, params))

    note_untyped("the Pipeline and its ends", "JAX cannot infer the types of 1F1B ticks")
    in_ticks = functools.partial(_grads_in_ticks, pipeline, loss_fn, **settings)
    return untyped(in_ticks, *args, out=types)


def _grads_in_ticks(
    pipeline: Pipeline,
    loss_fn: accumulation.LossFn,
    fixed: PyTree,
    params: PyTree,
    non_trainable: PyTree,
    inputs: accumulation.Batch,
    key: jax.Array,
    *,
    accumulation_steps: int = 1,
    inputs_split_mapping: Any = None,
    lay_out: Callable[[PyTree], PyTree] = lambda grads: grads,
) -> tuple[WeightedScalars, PyTree, PyTree]:
    """Implements `_value_and_grad` with Auto axes."""
    num_microbatches = _num_microbatches(pipeline, inputs, accumulation_steps)
    inputs = with_padding_rows(inputs, _num_missing_rows(pipeline, inputs, accumulation_steps))
    # Without ticks, microbatches only accumulate gradients.
    if not pipeline.is_in_ticks:
        with in_one_microbatch():
            return accumulation.value_and_grad(
                loss_fn,
                fixed,
                params,
                non_trainable,
                inputs,
                key,
                accumulation_steps=num_microbatches,
                inputs_split_mapping=inputs_split_mapping,
                lay_out=lay_out,
            )
    batches = accumulation.cut(inputs, num_microbatches)

    def batch_loss(params: PyTree, microbatch: Any) -> tuple:
        """Returns the loss and the metrics for a microbatch."""
        batch = jax.tree.map(lambda a: a[microbatch], batches)
        batch = accumulation.constrain_rows(batch, inputs_split_mapping)
        batch_key = key if num_microbatches == 1 else jax.random.fold_in(key, microbatch)
        loss, (metrics, _) = loss_fn(fixed, params, non_trainable, batch, batch_key)
        return loss, metrics

    full_weight = max(num_weights_of(inputs), 1) / num_microbatches
    # The model is cut at the pipeline: the ticks call the parts before and after it for one
    # microbatch at a time.
    model = SplitModel(batch_loss, params, num_microbatches, full_weight)
    schedule = InterleavedSchedule(
        pipeline.num_stages, num_microbatches, pipeline.circular_repeat, pipeline.split_backward
    )
    ticks = InterleavedTicks(schedule, *model.parts())
    grad_floats, grad_ends, metrics_M, weight_M = ticks.run()
    # The gradients are sums over microbatches, multiplied by their loss weights.
    total = jnp.sum(weight_M)
    divisor = jnp.where(total == 0, 1.0, total)
    grad_floats, grad_ends = jax.tree.map(lambda g: g / divisor, (grad_floats, grad_ends))
    grads = model.grad_params(dict(zip(ticks.floats, grad_floats, strict=True)), grad_ends)
    metrics = {
        name: jax.tree.map(lambda a: a[0], pairs)
        if num_microbatches == 1
        else accumulation.weighted_mean(*pairs)
        for name, pairs in metrics_M.items()
    }
    return metrics, non_trainable, lay_out(grads)
