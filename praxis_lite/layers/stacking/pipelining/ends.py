"""The ends of a model with a pipeline, before it and behind it, as ticks call them."""

from typing import Any, Protocol

import jax

from praxis_lite.layers.stacking.pipelining.ticks import Values

PyTree = Any


class Ends(Protocol):
    """A model's work on a microbatch before its pipeline, and behind it."""

    def enter(self, microbatch: jax.Array) -> jax.Array:
        """Returns x [rows, ...], the pipeline's input."""

    def enter_gradient(self, microbatch: jax.Array, of_x: jax.Array) -> PyTree:
        """Returns the gradient of the ends' weights, given that of x."""

    def leave(
        self, microbatch: jax.Array, x: jax.Array, values: Values
    ) -> tuple[PyTree, jax.Array, jax.Array, PyTree, Values]:
        """Returns (what is reported, weight, gradients of x, of the ends' weights and of values).

        The gradients are times the weight, a float32 scalar; where that is 0 they may be NaN.

        Args:
          values: that the blocks assigned, [R, S, P, ...]; those of floats have a gradient.
        """
