"""Computes gradients and metrics with explicit collectives in a `jax.shard_map`."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import spmd
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.core.collectives.mapped_weights import MappedWeight, mapped_weight, sharded
from praxis_lite.core.collectives.padding_rows import (
    num_missing_rows,
    num_weights_of,
    with_padding_rows,
)
from praxis_lite.core.collectives.varying import varying_over
from praxis_lite.core.errors import ConfigError, did_you_mean, require
from praxis_lite.core.learner.weight_groups import WeightGroups
from praxis_lite.core.partitioner import accumulation, steps
from praxis_lite.core.partitioner.gradient_strategy import GradientFunctions
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import InputsSplitMapping, num_rows_of
from praxis_lite.core.sharding.leaf_paths import path_of
from praxis_lite.core.sharding.logical_axes import LogicalAxisRules, axes_of
from praxis_lite.core.sharding.padding import pad_tree, unpad_tree
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.core.sharding.weight_spec import WeightSpec
from praxis_lite.core.task import Task, WeightedScalars

PyTree = Any
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class ExplicitCollectives:
    """Runs train and eval steps with explicit collectives, as the `gradients` of a Partitioner.

    The layout of the state does not change, so checkpoints are interchangeable. Along `data_axes`,
    each device runs the model on its rows of the batch:

    - A weight that is split over these axes (fully sharded data parallelism) is gathered when the
      model reads it, and gathered again when a layer is recomputed in the backward pass. The
      weight's gradient is reduce-scattered.
    - Gradients of other weights, metrics and batch statistics are summed over devices once per
      step, after all microbatches. The compiler would instead sum gradients over devices in each
      microbatch.

    The compiler still handles splits over other mesh axes (tensor parallelism). Init, the learner's
    update, decoding and checkpoints work as they do without this strategy.

    Means over devices are weighted by the metrics' weights, so losses and gradients equal those on
    one device. Values that are not sums over rows differ, as they do with microbatches: batch norm
    uses the statistics of each device, its running statistics are averaged over devices with the
    loss weights, and a router balances the load on each device separately. Each device uses a
    different key.

    Batches are padded with copies of the first row, with `weights` set to 0. JAX checks which
    values vary between devices (`check_vma`).

    Attributes:
      data_axes: Mesh axes with explicit collectives.
    """

    data_axes: Sequence[str] = ("data",)

    def on(
        self, task: Task, mesh: Mesh, layout: StateLayout, groups: WeightGroups
    ) -> GradientFunctions:
        """Returns the functions that compute gradients and metrics for a task on a mesh.

        Raises:
          ConfigError: An axis is not in the mesh; the `data_axes` have only one device, but the
            mesh has more; a weight's dim is split over both a data axis and another axis; stacked
            layers are split over a data axis; or some weights are in host memory.
        """
        if layout.has_host_memory:
            raise ConfigError(
                "ExplicitCollectives cannot be combined with weights in host memory "
                "(Repeat.offload_weights), because it gathers weights between devices. Remove one "
                "of the two."
            )
        on_mesh = _OnMesh(_checked_axes(self.data_axes, mesh), task, mesh, layout, groups)
        return GradientFunctions(
            on_mesh.value_and_grad, on_mesh.evaluate, on_mesh.num_padding_rows, on_mesh.num_parts
        )


class _OnMesh:
    def __init__(
        self,
        data_axes: tuple[str, ...],
        task: Task,
        mesh: Mesh,
        layout: StateLayout,
        groups: WeightGroups,
    ):
        self.data_axes, self.mesh = data_axes, mesh
        # XLA cannot sum over a single device while it also partitions other axes; see
        # docs/upstream.md.
        self.num_parts = math.prod(mesh.shape[axis] for axis in data_axes)
        if self.num_parts == 1 and mesh.size > 1:
            raise ConfigError(
                f"ExplicitCollectives.data_axes {data_axes} have only one device on the mesh "
                f"{dict(mesh.shape)}; expected two or more, because XLA cannot sum over a single "
                "device while it partitions other axes. Omit the Partitioner's gradients, or use a "
                "different mesh."
            )
        params = layout.select("params")
        self._weights = jax.tree.map_with_path(
            self._mapped_weight, params.shapes, params.specs, groups.weight_specs
        )
        self._trained, self._frozen = groups.split(self._weights)
        declared = task.weight_sharding
        self._on_each_device = functools.partial(
            on_each_device,
            data_axes=data_axes,
            axis_rules=declared.rules_in_use if declared else (),
        )

    def _mapped_weight(
        self,
        path: tuple[Any, ...],
        shape: jax.ShapeDtypeStruct,
        spec: PartitionSpec,
        weight_spec: WeightSpec,
    ) -> MappedWeight:
        sizes, num_layers = dict(self.mesh.shape), len(weight_spec.stack_shape)
        return mapped_weight(path_of(path), shape.shape, num_layers, spec, self.data_axes, sizes)

    def num_padding_rows(self, inputs: PyTree, accumulation_steps: int) -> int:
        """Returns the number of padding rows that a batch needs to split evenly."""
        return num_missing_rows(
            inputs,
            self.num_parts * accumulation_steps,
            f"{self.num_parts} devices along {self.data_axes} with {accumulation_steps} "
            "microbatches",
        )

    def _padded(self, inputs: Mapping[str, jax.Array], accumulation_steps: int) -> PyTree:
        return with_padding_rows(inputs, self.num_padding_rows(inputs, accumulation_steps))

    def value_and_grad(
        self,
        loss_fn: accumulation.LossFn,
        fixed: dict[str, Any],
        trainable: PyTree,
        non_trainable: PyTree,
        inputs: Mapping[str, jax.Array],
        key: jax.Array,
        *,
        accumulation_steps: int,
        inputs_split_mapping: InputsSplitMapping,
        lay_out: Callable[[PyTree], PyTree],
    ) -> tuple[WeightedScalars, PyTree, PyTree]:
        # The optimizer slots' layout also uses data axes, which are manual here, so gradients are
        # summed in the layout of the weights instead.
        del lay_out
        inputs = self._padded(inputs, accumulation_steps)
        # Expected weight of a device's microbatch. Loss x weight is divided by it, so that the
        # differentiated value is about as large as the loss, and stays in the range of float16.
        size = max(num_weights_of(inputs), 1) / self.num_parts / accumulation_steps

        def on_a_device(
            inputs: PyTree, fixed: Any, blocks: PyTree, non_trainable: PyTree, key: jax.Array
        ) -> tuple[WeightedScalars, PyTree, PyTree]:
            # Cast to varying, because JAX would otherwise sum gradients of replicated weights in
            # each microbatch. The gradients are summed once, below.
            fixed, blocks, old, key = varying_over(
                (fixed, blocks, non_trainable, key), self.data_axes
            )
            fixed = {**fixed, "frozen": sharded(fixed["frozen"], self._frozen)}
            metrics, new, grads = accumulation.value_and_grad(
                self._weighted_loss(loss_fn, size),
                fixed,
                blocks,
                old,
                inputs,
                jax.random.fold_in(key, jax.lax.axis_index(self.data_axes)),
                accumulation_steps=accumulation_steps,
                inputs_split_mapping=inputs_split_mapping,
                lay_out=lambda grads: jax.tree.map(
                    lambda g, weight: constrain(g, tuple(weight.spec)), grads, self._trained
                ),
            )
            metrics = {
                name.removeprefix("mean/"): pair for name, pair in metrics.items() if name != "loss"
            }
            with jax.named_scope("sum_over_devices"):
                grads = jax.tree.map(
                    lambda g, weight: summed(g, weight, self.data_axes), grads, self._trained
                )
                new = mean_change(non_trainable, new, metrics["loss"][1], self.data_axes)
            metrics = weighted_means(metrics, self.data_axes)
            # The gradients are the sum of weight x gradient, divided by `size` and by the number of
            # microbatches. `total` is the sum of weights, divided likewise.
            total = metrics["loss"][1] / (size * accumulation_steps)
            factor = jnp.where(total == 0, 0.0, 1.0 / total)
            return metrics, new, jax.tree.map(lambda g: g * factor, grads)

        blocks, specs = self._blocks(trainable, self._trained)
        frozen_blocks, frozen_specs = self._blocks(fixed["frozen"], self._frozen)
        metrics, non_trainable, grads = self._on_each_device(
            on_a_device,
            inputs,
            (
                fixed | {"frozen": frozen_blocks},
                dict.fromkeys(fixed, REPLICATED) | {"frozen": frozen_specs},
            ),
            (blocks, specs),
            (non_trainable, REPLICATED),
            (key, REPLICATED),
            out=(REPLICATED, REPLICATED, specs),
        )
        specs = jax.tree.map(lambda weight: weight.spec, self._trained)
        return metrics, non_trainable, unpad_tree(grads, trainable, specs)

    def _weighted_loss(self, loss_fn: accumulation.LossFn, size: float) -> accumulation.LossFn:
        """Returns a function that computes loss x weight / size from a device's rows and blocks.

        It returns the metrics of `loss_fn` under names with the prefix "mean/".
        """

        def weighted_loss(
            fixed: PyTree, blocks: PyTree, old: PyTree, inputs: accumulation.Batch, key: jax.Array
        ) -> tuple[jax.Array, tuple[WeightedScalars, PyTree]]:
            inputs, has_weight = with_nonzero_weights(inputs)
            params = sharded(blocks, self._trained)
            loss, (metrics, new) = loss_fn(fixed, params, old, inputs, key)
            metrics = {name: (v, jnp.where(has_weight, w, 0.0)) for name, (v, w) in metrics.items()}
            weight = jax.lax.stop_gradient(metrics["loss"][1])
            new = jax.tree.map(lambda n, o: jnp.where(weight != 0, n, o), new, old)
            # With a "loss" of weight 1, the weighted mean in `accumulation` becomes a plain mean.
            unit = {"loss": (jnp.zeros(()), jnp.ones(()))}
            metrics = unit | {f"mean/{name}": pair for name, pair in metrics.items()}
            # The loss must vary over devices, so that every device contributes to the sum.
            return varying_over(loss * (weight / size), self.data_axes), (metrics, new)

        return weighted_loss

    def evaluate(
        self, task: Task, mdl_vars: PyTree, inputs: PyTree, key: jax.Array | None
    ) -> tuple[WeightedScalars, dict[str, jax.Array]]:
        def on_a_device(
            inputs: PyTree, blocks: PyTree, non_trainable: PyTree, key: Any
        ) -> tuple[WeightedScalars, dict[str, jax.Array]]:
            inputs, has_weight = with_nonzero_weights(inputs)
            blocks, non_trainable = varying_over((blocks, non_trainable), self.data_axes)
            params = sharded(blocks, self._weights)
            mdl_vars = {"params": params, "non_trainable": non_trainable}
            # Devices have different rows, so they draw different random numbers.
            key = jax.random.fold_in(key, jax.lax.axis_index(self.data_axes))
            metrics, examples = steps.eval_step(task, mdl_vars, inputs, key)
            metrics = {name: (v, jnp.where(has_weight, w, 0.0)) for name, (v, w) in metrics.items()}
            return weighted_means(metrics, self.data_axes), examples

        metrics, examples = self._on_each_device(
            on_a_device,
            self._padded(inputs, 1),
            self._blocks(mdl_vars["params"], self._weights),
            (mdl_vars["non_trainable"], REPLICATED),
            (jax.random.key(0) if key is None else key, REPLICATED),
            out=(REPLICATED, PartitionSpec(self.data_axes)),
        )
        # Remove the padding rows.
        num_rows = num_rows_of(inputs)
        return metrics, {name: x[:num_rows] for name, x in examples.items()}

    def _blocks(self, params: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
        """Pads the weights, and returns them with their `in_specs` for the `jax.shard_map`."""
        specs = jax.tree.map(lambda weight: weight.spec, weights)
        mapped_specs = jax.tree.map(lambda weight: weight.mapped_spec, weights)
        return pad_tree(params, specs, dict(self.mesh.shape)), mapped_specs


def _checked_axes(data_axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    axes = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    require(
        not unknown and bool(axes) and len(set(axes)) == len(axes),
        "ExplicitCollectives.data_axes",
        axes,
        f"one or more of the mesh axes {mesh.axis_names}, without duplicates",
        did_you_mean(str(unknown[0]), mesh.axis_names).strip() if unknown else "",
    )
    return axes


def on_each_device(
    function: Callable[..., Any],
    inputs: PyTree,
    *others: tuple[PyTree, PyTree],
    out: Any,
    data_axes: tuple[str, ...],
    axis_rules: LogicalAxisRules = (),
) -> Any:
    """Runs `function(inputs, *others)` on each device, in a `jax.shard_map` over the data axes.

    Args:
      function: Takes this device's rows and the other trees.
      inputs: Arrays whose rows are split over the devices; scalars are replicated.
      others: Pairs of a tree and its PartitionSpecs (or one PartitionSpec for all leaves).
      out: PartitionSpecs of the results.
      data_axes: Manual mesh axes; the compiler handles the other axes.
      axis_rules: The job's logical axis rules, which Linen layers apply to activations.

    Raises:
      ConfigError: The model constrains an array over a data axis.
    """
    rows = jax.tree.map(lambda x: PartitionSpec(data_axes) if x.ndim else PartitionSpec(), inputs)
    mapped = jax.shard_map(
        function,
        in_specs=(rows, *(specs for _, specs in others)),
        out_specs=out,
        axis_names=set(data_axes),
    )
    # Constraints inside must not use data axes.
    rules = [
        (name, tuple(axis for axis in axes_of(axes) if axis not in data_axes) or None)
        for name, axes in axis_rules
    ]
    with (
        _explaining_constraint_errors(data_axes),
        spmd.logical_axis_rules(rules) if rules else contextlib.nullcontext(),
    ):
        return mapped(inputs, *(tree for tree, _ in others))


@contextlib.contextmanager
def _explaining_constraint_errors(data_axes: Sequence[str]) -> Iterator[None]:
    """Converts JAX's error for a constraint over a manual axis into a ConfigError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if "sharding_constraint" not in str(error) or "Manual" not in str(error):
            raise
        raise ConfigError(
            "The model constrains the sharding of an activation over one of the data_axes "
            f"{data_axes}, but under ExplicitCollectives these axes are manual. Remove the axis "
            "from jax.lax.with_sharding_constraint, call praxis_lite.core.constrain instead, or "
            f"omit the Partitioner's gradients. JAX's error: {error}"
        ) from error


def with_nonzero_weights(
    inputs: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Replaces the weights with ones if all of them are 0; also returns whether any was nonzero.

    If all weights of a device are 0, the caller multiplies the device's results by 0. Without the
    replacement, the mean over zero rows could be NaN, and the sums over devices would then also be
    NaN.
    """
    if "weights" not in inputs:
        return dict(inputs), jnp.ones((), bool)
    weights = inputs["weights"]
    has_weight = jnp.any(weights != 0)
    weights = jnp.where(has_weight, weights, jnp.ones_like(weights))
    return {**inputs, "weights": weights}, has_weight


def summed(grad: jax.Array, weight: MappedWeight, data_axes: Sequence[str]) -> jax.Array:
    """Sums a gradient over the data axes, except those that the weight's gather sums over."""
    reduced = {axis for entry in weight.mapped_spec for axis in axes_of(entry)}
    axes = tuple(axis for axis in data_axes if axis not in reduced)
    return jax.lax.psum(grad, axes) if axes else grad


@jax.named_scope("sum_over_devices")
def weighted_means(metrics: WeightedScalars, data_axes: Sequence[str]) -> WeightedScalars:
    """Returns (weighted mean over devices, total weight) for each metric."""

    def mean(value: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = jnp.asarray(weight, jnp.float32)
        weighted = jnp.where(weight != 0, value * weight, 0.0)
        weighted_sum, total = jax.lax.psum((weighted, weight), data_axes)
        return weighted_sum / jnp.where(total == 0, 1.0, total), total

    return {name: mean(*pair) for name, pair in metrics.items()}


def mean_change(old: PyTree, new: PyTree, weight: jax.Array, data_axes: Sequence[str]) -> PyTree:
    """Returns `old` plus the weighted mean over devices of `new - old`.

    Integers and PRNG keys must be equal on all devices; the maximum over devices is returned.
    """

    def mean(old: jax.Array, new: jax.Array) -> jax.Array:
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            bits = jax.lax.pmax(jax.random.key_data(new), data_axes)
            new = jax.random.wrap_key_data(bits, impl=jax.random.key_impl(new))
            return new
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            new = jax.lax.pmax(new, data_axes)
            return new
        # Unchanged values, including infinities, must stay bitwise equal.
        change = jnp.where(new == old, 0.0, new - old) * weight
        change, total = jax.lax.psum((change, weight), data_axes)
        new_mean: jax.Array = (old + change / jnp.where(total == 0, 1.0, total)).astype(new.dtype)
        return new_mean

    return jax.tree.map(mean, old, new)
