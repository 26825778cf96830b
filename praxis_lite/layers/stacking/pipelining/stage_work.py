"""The forward pass of a stage on a microbatch, and its backward pass, split into two parts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.vmapped_axes import before_vmap, vmap_over
from praxis_lite.layers.base.variables import assigned_values
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Place
from praxis_lite.layers.stacking.pipelining.split_backward import SplitFunction, split_function
from praxis_lite.layers.stacking.pipelining.ticks import (
    StageLayout,
    Values,
    apply_layer_at,
    copy_to_stages,
    pick,
)

# R repeats, S stages, P layers per stage and repeat, M microbatches. Name suffixes give the leading
# dims of arrays.

PyTree = Any


def floats_of(arrays: Sequence[jax.Array]) -> list[int]:
    """Returns the indices of the arrays that have a gradient."""
    return [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.inexact)]


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The computation of all stages.

    Methods take `arrays`: the arrays of the blocks [R, S, P, ...], followed by the inputs
    [M, S, ...].

    Attributes:
      treedef: Tree structure of the blocks.
      num_leaves: Number of arrays in the blocks.
      inputs_treedef: Tree structure of the inputs.
      others: Inputs that are not arrays.
      num_stages: S.
      num_layers: Number of layers per repeat, at most S P.
      layout: The sharding of arrays with a stage dim.
    """

    treedef: jax.tree_util.PyTreeDef
    num_leaves: int
    inputs_treedef: jax.tree_util.PyTreeDef
    others: dict[str, Any]
    num_stages: int
    num_layers: int
    layout: StageLayout

    @property
    def stages(self) -> jax.Array:
        """Stage indices, 0 to S - 1."""
        return jnp.arange(self.num_stages)

    def vmap(
        self, function: Callable[..., Any], split: SplitFunction | None = None, **settings: Any
    ) -> Callable[..., Any]:
        """Returns `jax.vmap(function, **settings)` over the stages.

        Args:
          function: A function of the arrays of one stage.
          split: The split function that `function` calls, if any.
          settings: Arguments of `jax.vmap`.
        """
        axes = self.layout.vmapped_axes(self.num_stages)
        if split is not None and split.manual_axes is not None:
            axes = axes if set(axes) <= split.manual_axes else ()
        return vmap_over(axes, function, **settings)

    def arrays(self, leaves: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the blocks' arrays and a copy of the inputs for each stage, [X, S, ...]."""
        return [*leaves, *copy_to_stages(list(inputs), self.num_stages, self.layout, dim=1)]

    def assigned(self, arrays: Sequence[jax.Array]) -> Values:
        """Returns the values of the variables that the blocks assign, [R, S, P, ...]."""
        return assigned_values(jax.tree.unflatten(self.treedef, arrays[: self.num_leaves]))

    def picked(self, arrays: Sequence[jax.Array], place: Place) -> list[jax.Array]:
        """Indexes the arrays by the repeat (weights) or the microbatch (inputs)."""
        return [pick(a, self.index(i, place)) for i, a in enumerate(arrays)]

    def index(self, number: int, place: Place) -> Any:
        """Returns the repeat if array `number` is a weight, or the microbatch if it is an input."""
        return place.repeat if number < self.num_leaves else place.microbatch

    def work(
        self,
        arrays: Sequence[jax.Array],
        key: Any,
        place: Place,
        x: jax.Array,
    ) -> tuple[jax.Array, Values]:
        """Runs a stage on arrays from `picked`; returns (x, assigned values [P, ...]).

        Layers are unrolled, because `split_function` does not split loops.
        """
        leaves_P = arrays[: self.num_leaves]
        inputs = jax.tree.unflatten(self.inputs_treedef, arrays[self.num_leaves :])
        layers_per_stage, values_P = len(leaves_P[0]), []
        for index in range(layers_per_stage):
            block = jax.tree.unflatten(self.treedef, [leaf[index] for leaf in leaves_P])
            x, _, values = apply_layer_at(
                block,
                x,
                place.stage * layers_per_stage + index,
                place,
                num_layers=self.num_layers,
                has_padding_layers=layers_per_stage * self.num_stages > self.num_layers,
                key=key,
                cache=None,
                **inputs,
                **self.others,
            )
            values_P.append(values)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *values_P)

    def unstack_layers(self, number: int, array: jax.Array, dim: int) -> PyTree:
        """Unstacks an array of the blocks along its layer dim; returns inputs unchanged.

        Gradients are accumulated unstacked, because JAX would stack the layers' gradients with
        pads. On TPU, XLA does not recognize a cross-device reduction that is followed by a pad.
        """
        if number >= self.num_leaves:
            return array
        return [
            jax.lax.index_in_dim(array, index, dim, keepdims=False)
            for index in range(array.shape[dim])
        ]

    def stack_layers(self, number: int, array: PyTree) -> jax.Array:
        """Stacks the arrays of the layers along dim 2, as the inverse of `unstack_layers`."""
        return array if number >= self.num_leaves else jnp.stack(array, axis=2)

    def split(
        self, arrays: list, floats: Sequence[int], key: Any, x_S: Any, values: Values
    ) -> SplitFunction:
        """Splits a stage's backward pass: first the gradient of x, then those of the arrays.

        The backward pass takes the arguments of `work`, followed by the gradients with respect to
        the results of `work`. The gradients of arrays are unstacked, as by `unstack_layers`.

        Args:
          arrays: All arrays, [X, S, ...].
          floats: Indices of the arrays whose gradients are needed.
          key: Random key of the pass, or None.
          x_S: An array [S, rows, ...], or its `jax.ShapeDtypeStruct`.
          values: Assigned values [R, S, P, ...], or their shapes; only floats have gradients.
        """
        num_shared = 3  # The arguments of `work` before x.

        def backward(*args: Any) -> tuple[jax.Array, list[jax.Array]]:
            arrays, key, place, x, grad_y, grad_values = args

            def work(values: list, x: jax.Array) -> tuple[jax.Array, Values]:
                given = dict(enumerate(arrays)) | dict(zip(floats, values, strict=True))
                y, assigned = self.work(list(given.values()), key, place, x)
                return y, {path: assigned[path] for path in grad_values}

            # Differentiate with respect to x and the float arrays, with separate arrays per layer.
            _, vjp_fn = jax.vjp(work, [self.unstack_layers(i, arrays[i], 0) for i in floats], x)
            grad_floats, grad_x = vjp_fn((grad_y, grad_values))
            return grad_x, grad_floats

        # Trace with the shapes of one stage, and one repeat or microbatch.
        index = jax.ShapeDtypeStruct((), self.stages.dtype)
        grad_values = {
            path: a for path, a in values.items() if jnp.issubdtype(a.dtype, jnp.inexact)
        }
        arrays, grad_values = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), (arrays, grad_values)
        )
        x = jax.ShapeDtypeStruct(x_S.shape[1:], x_S.dtype)
        args = arrays, key, Place(index, index, index), x, x, grad_values
        with before_vmap(self.layout.vmapped_axes(self.num_stages)):
            return split_function(backward, args, num_shared)


def add_at(total: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """Adds `part` to total[index], or to total[0] if that is the only entry."""
    at = 0 if total.shape[0] == 1 else index
    part += jax.lax.dynamic_index_in_dim(total, at, axis=0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, part, at, axis=0)
