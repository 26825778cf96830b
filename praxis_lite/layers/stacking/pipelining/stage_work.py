"""The work of a stage on one microbatch: forward, and backward in two parts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.vmapped_axes import before_vmap, vmap_over
from praxis_lite.layers.base.variables import assigned_values
from praxis_lite.layers.stacking.pipelining.split_backward import SplitProgram, split_program
from praxis_lite.layers.stacking.pipelining.ticks import (
    StageLayout,
    Values,
    apply_layer_at,
    of_each_stage,
    pick,
)

# R repeats, S stages, P places of layers of one stage in one repeat, M microbatches. Names end with
# the leading dims of their arrays.

PyTree = Any


def floats_of(arrays: Sequence[jax.Array]) -> list[int]:
    """Returns the indices of the arrays that have a gradient."""
    return [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.inexact)]


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The work of all stages; `arrays` are those of blocks [R, S, P, ...] and inputs [M, S, ...].

    Attributes:
      form, num_leaves: tree structure and number of arrays of the blocks.
      others: inputs that are not arrays.
      num_layers: of a repeat; they have the first of its S P places.
    """

    form: Any
    num_leaves: int
    inputs_form: Any
    others: dict[str, Any]
    num_stages: int
    num_layers: int
    layout: StageLayout

    @property
    def stages(self) -> jax.Array:
        """0 to S - 1."""
        return jnp.arange(self.num_stages)

    def vmap(
        self, function: Callable[..., Any], split: SplitProgram | None = None, **settings: Any
    ) -> Callable[..., Any]:
        """Returns `jax.vmap(function, **settings)` over the stages.

        Args:
          split: that the function calls.
        """
        axes = self.layout.vmapped_axes(self.num_stages)
        if split is not None and split.axes_by_hand is not None:
            axes = axes if set(axes) <= split.axes_by_hand else ()
        return vmap_over(axes, function, **settings)

    def arrays(self, leaves: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays, [X, S, ...]; of the inputs a copy per stage."""
        return [*leaves, *of_each_stage(list(inputs), self.num_stages, self.layout, dim=1)]

    def assigned(self, arrays: Sequence[jax.Array]) -> Values:
        """Returns the variables that the blocks assign, [R, S, P, ...]."""
        return assigned_values(jax.tree.unflatten(self.form, arrays[: self.num_leaves]))

    def picked(self, arrays: Sequence[jax.Array], microbatch: Any, repeat: Any) -> list[jax.Array]:
        """Returns the arrays of a microbatch and a repeat."""
        return [pick(a, self.index(i, microbatch, repeat)) for i, a in enumerate(arrays)]

    def index(self, number: int, microbatch: Any, repeat: Any) -> Any:
        """Returns the index of an array's part."""
        return repeat if number < self.num_leaves else microbatch

    def work(
        self, arrays: Sequence[jax.Array], key: Any, stage: jax.Array, microbatch: jax.Array,
        repeat: jax.Array, x: jax.Array,
    ) -> tuple[jax.Array, Values]:
        """Returns a stage's (x, assigned values [P, ...]) in a tick, of its picked arrays.

        Its layers are unrolled, because a loop could not be split in two.
        """
        leaves_P = arrays[: self.num_leaves]
        inputs = jax.tree.unflatten(self.inputs_form, arrays[self.num_leaves :])
        num_places, values_P = len(leaves_P[0]), []
        for place in range(num_places):
            block = jax.tree.unflatten(self.form, [leaf[place] for leaf in leaves_P])
            x, _, values = apply_layer_at(
                block, x, stage * num_places + place, repeat, microbatch,
                num_layers=self.num_layers,
                has_free_places=num_places * self.num_stages > self.num_layers,
                key=key, cache=None, **inputs, **self.others,
            )
            values_P.append(values)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *values_P)

    def apart(self, number: int, array: jax.Array, dim: int) -> PyTree:
        """Returns an array of the blocks as a list along its dim of places, an input unchanged.

        Gradients are summed in this form: on TPU XLA does not find sums over devices behind the
        pads with which JAX would stack the places' gradients.
        """
        if number >= self.num_leaves:
            return array
        return [
            jax.lax.index_in_dim(array, place, dim, keepdims=False)
            for place in range(array.shape[dim])
        ]

    def together(self, number: int, array: PyTree) -> jax.Array:
        """Returns the inverse of `apart` for [R, S, P, ...]."""
        return array if number >= self.num_leaves else jnp.stack(array, axis=2)

    def split(
        self, arrays: list, floats: Sequence[int], key: Any, x_S: Any, values: Values
    ) -> SplitProgram:
        """Splits a stage's backward pass: first the gradient of x, then those of floats, `apart`.

        Its arguments are those of `work`, then the gradients of x and of assigned values.

        Args:
          floats: indices of the arrays whose gradients are needed.
          x_S: an array, or its shape and dtype.
          values: assigned values, [R, S, P, ...], or their shapes; float ones have gradients.
        """
        num_again = 5

        def program(*args: Any) -> tuple[jax.Array, list[jax.Array]]:
            arrays, *places = args[:num_again]
            x, of_y, of_values = args[num_again:]

            def work(values: list, x: jax.Array) -> tuple[jax.Array, Values]:
                given = dict(enumerate(arrays)) | dict(zip(floats, values, strict=True))
                y, assigned = self.work(list(given.values()), *places, x)
                return y, {path: assigned[path] for path in of_values}

            _, pull = jax.vjp(work, [self.apart(i, arrays[i], 0) for i in floats], x)
            of_floats, of_x = pull((of_y, of_values))
            return of_x, of_floats

        index = jax.ShapeDtypeStruct((), self.stages.dtype)
        of_values = {
            path: a for path, a in values.items() if jnp.issubdtype(a.dtype, jnp.inexact)
        }
        arrays, of_values = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), (arrays, of_values)
        )
        x = jax.ShapeDtypeStruct(x_S.shape[1:], x_S.dtype)
        args = arrays, key, index, index, index, x, x, of_values
        with before_vmap(self.layout.vmapped_axes(self.num_stages)):
            return split_program(program, args, num_again)


def added(total: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `total` with `part` added to total[index], or to the only part there is."""
    index = 0 if total.shape[0] == 1 else index
    part += jax.lax.dynamic_index_in_dim(total, index, axis=0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, part, index, axis=0)
