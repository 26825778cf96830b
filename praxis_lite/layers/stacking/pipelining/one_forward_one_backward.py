"""Gradients of a model with a pipeline by 1F1B: its loss is computed within the ticks."""

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
from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.partitioner import accumulation
from praxis_lite.core.partitioner.gradient_strategy import Gradients
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.core.sharding.devices.axis_types import note_untyped, type_spec, untyped
from praxis_lite.core.task import Task
from praxis_lite.layers.base.variables import assigned_values
from praxis_lite.layers.stacking.pipelines import Pipeline
from praxis_lite.layers.stacking.pipelining.interleaved_ticks import InterleavedTicks
from praxis_lite.layers.stacking.pipelining.microbatches import num_microbatches_of
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import InterleavedSchedule
from praxis_lite.layers.stacking.pipelining.split_model import SplitModel, in_one_microbatch

PyTree = Any


@dataclasses.dataclass(frozen=True)
class OneForwardOneBackward:
    """Gradients of a model with one Pipeline by 1F1B (arXiv:2104.04473).

    A microbatch goes backward as soon as it has left the last stage: a stage stores the inputs of
    2 R S - 1 microbatches, independent of M. What comes before and after the Pipeline, embedding
    and loss, is computed for each microbatch within the ticks. With `Pipeline.split_backward`
    gradients of weights have no bubbles (ZB-H1, arXiv:2401.10241).

    The results equal gradient accumulation over the Pipeline's microbatches, which also runs on
    meshes without the stage axis. If the loss is a weighted mean over rows, they equal those of the
    complete batch.
    """

    def on(
        self, task: Task, mesh: Mesh, layout: StateLayout, learner: BoundLearner
    ) -> Gradients:
        """Returns the functions of a task on a mesh.

        Raises:
          ConfigError: the model does not have one Pipeline, or updates variables in a pass.
        """
        pipeline = _pipeline_of(task)
        return Gradients(
            value_and_grad=functools.partial(_value_and_grad, pipeline),
            check_rows=functools.partial(_num_missing_rows, pipeline),
            num_micro_batches=functools.partial(_num_microbatches, pipeline),
            sums_in_a_loop=True,
        )


def _pipeline_of(task: Task) -> Pipeline:
    module = task.model.abstract_module()
    modules = [] if module is None else [item for _, item in nnx.compat.iter_modules(module)]
    pipelines = [item for item in modules if isinstance(item, Pipeline)]
    if len(pipelines) != 1:
        raise ConfigError(
            f"OneForwardOneBackward found {len(pipelines)} Pipelines in the model; expected one. "
            "Leave the Partitioner's gradients out, or make the model's stack a Pipeline."
        )
    kept = {
        str(path[-1]) for path, node in nnx.compat.iter_graph(module)
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param | nnx.Intermediate)
    }
    if kept:
        raise ConfigError(
            "OneForwardOneBackward found variables that are updated in each pass: "
            f"{', '.join(sorted(kept))}; expected a model without batch statistics, because a "
            "stage does not know yet which microbatches have no weight. Leave the Partitioner's "
            "gradients out: the Pipeline alone supports such variables."
        )
    return pipelines[0]


def _num_microbatches(pipeline: Pipeline, inputs: PyTree, num_micro_batches: int) -> int:
    """Returns the microbatches of a batch, in all of its micro-batches of accumulation."""
    num_rows = -(-num_rows_of(inputs) // num_micro_batches)
    num_microbatches = num_microbatches_of(
        num_rows, pipeline.num_microbatches, pipeline.microbatch_size
    )
    return num_microbatches * num_micro_batches


def _num_missing_rows(pipeline: Pipeline, inputs: PyTree, num_micro_batches: int) -> int:
    """Returns the rows that a batch lacks to divide over the microbatches."""
    num_microbatches = _num_microbatches(pipeline, inputs, num_micro_batches)
    num_rows = num_rows_of(inputs)
    if num_rows % num_microbatches and assigned_values(pipeline.blocks):
        raise ConfigError(
            f"A batch has {num_rows} rows, which {num_microbatches} microbatches do not divide, "
            "and the Pipeline's blocks assign variables, which would count padding rows. "
            f"Make the batch size a multiple of {num_microbatches}."
        )
    return num_missing_rows(inputs, num_microbatches, f"{num_microbatches} microbatches")


def _value_and_grad(
    pipeline: Pipeline, loss_fn: accumulation.LossFn, fixed: PyTree, params: PyTree,
    non_trainable: PyTree, inputs: accumulation.Batch, key: jax.Array, **settings: Any,
) -> tuple[accumulation.WeightedScalars, PyTree, PyTree]:
    """Returns the result of `accumulation.value_and_grad` over all microbatches.

    Ticks are computed over Auto axes: JAX cannot type a stage's work.
    """
    def types(results: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
        whole = jax.tree.map(lambda x: PartitionSpec(), results[0])
        return whole, *jax.tree.map(type_spec, (non_trainable, params))

    note_untyped("the Pipeline and its ends", "ticks of 1F1B have no types")
    in_ticks = functools.partial(_grads_in_ticks, pipeline, loss_fn, **settings)
    return untyped(in_ticks, fixed, params, non_trainable, inputs, key, out=types)


def _grads_in_ticks(
    pipeline: Pipeline, loss_fn: accumulation.LossFn, fixed: PyTree, params: PyTree,
    non_trainable: PyTree, inputs: accumulation.Batch, key: jax.Array, *,
    num_micro_batches: int = 1, inputs_split_mapping: Any = None,
    lay_out: Callable[[PyTree], PyTree] = lambda grads: grads,
) -> tuple[accumulation.WeightedScalars, PyTree, PyTree]:
    """Returns the result of `_value_and_grad`, without types."""
    num_microbatches = _num_microbatches(pipeline, inputs, num_micro_batches)
    inputs = with_padding_rows(inputs, _num_missing_rows(pipeline, inputs, num_micro_batches))
    if not pipeline.is_in_ticks:
        with in_one_microbatch():
            return accumulation.value_and_grad(
                loss_fn, fixed, params, non_trainable, inputs, key,
                num_micro_batches=num_microbatches, inputs_split_mapping=inputs_split_mapping,
                lay_out=lay_out,
            )
    cut = accumulation.cut(inputs, num_microbatches)

    def batch_loss(params: PyTree, microbatch: Any) -> tuple:
        """Returns the loss of a microbatch, and metrics."""
        batch = jax.tree.map(lambda a: a[microbatch], cut)
        batch = accumulation.constrain_rows(batch, inputs_split_mapping)
        of_batch = key if num_microbatches == 1 else jax.random.fold_in(key, microbatch)
        loss, (metrics, _) = loss_fn(fixed, params, non_trainable, batch, of_batch)
        return loss, metrics

    full_weight = max(num_weights_of(inputs), 1) / num_microbatches
    model = SplitModel(batch_loss, params, num_microbatches, full_weight)
    schedule = InterleavedSchedule(
        pipeline.num_stages, num_microbatches, pipeline.circular_repeat, pipeline.split_backward
    )
    ticks = InterleavedTicks(schedule, *model.parts())
    of_floats, of_ends, metrics_M, weight_M = ticks.run()
    total = jnp.sum(weight_M)
    divisor = jnp.where(total == 0, 1.0, total)
    of_floats, of_ends = jax.tree.map(lambda g: g / divisor, (of_floats, of_ends))
    grads = model.of_params(dict(zip(ticks.floats, of_floats, strict=True)), of_ends)
    metrics = {
        name: jax.tree.map(lambda a: a[0], pairs) if num_microbatches == 1
        else accumulation.weighted_mean(*pairs)
        for name, pairs in metrics_M.items()
    }
    return metrics, non_trainable, lay_out(grads)
