"""Splits a model into functions for the parts before and after its pipeline.

While a cut function is active, a Pipeline that is called without a cache calls the cut function
instead of its blocks. Layers and tasks therefore need not declare where to split the model: each
part traces the complete model, and XLA removes the operations that the part does not need.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.layers.base.variables import assign
from praxis_lite.layers.stacking.pipelining.microbatches import arrays_of
from praxis_lite.layers.stacking.pipelining.split_backward import used_arguments
from praxis_lite.layers.stacking.pipelining.stage_work import StageWork, floats_of
from praxis_lite.layers.stacking.pipelining.ticks import Values

__all__ = ("in_one_microbatch",)

# R repeats, S stages, P layers per stage and repeat, M microbatches.

PyTree = Any

# Takes the arguments of a Pipeline's call, (pipeline, x, key, inputs), and returns x.
Cut = Callable[[Any, Any, Any, dict[str, Any]], Any]

_CUT: contextvars.ContextVar[Cut | None] = contextvars.ContextVar("cut", default=None)


def active_cut() -> Cut | None:
    """Returns the function that currently replaces calls to Pipelines, or None."""
    return _CUT.get()


@contextlib.contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """Makes Pipelines call `cut` instead of their blocks inside the `with` block."""
    token = _CUT.set(cut)
    try:
        yield
    finally:
        _CUT.reset(token)


def in_one_microbatch() -> contextlib.AbstractContextManager[None]:
    """Makes Pipelines process all rows in a call as one microbatch inside the `with` block."""
    return cutting(
        lambda pipeline, x, key, inputs: pipeline.apply_in_microbatches(
            x, 1, key=key, cache=None, **inputs
        )[0]
    )


class SplitModel:
    """A model's loss function, split into `enter` before its pipeline and `leave` after it.

    Weights that are used at both ends, such as a tied embedding, receive the sum of both gradients.

    Args:
      loss: Takes (params, microbatch), and returns (loss, metrics).
      params: The weights.
      num_microbatches: Number of microbatches, M.
      full_weight: Expected loss weight of a microbatch. Loss weights are divided by this value, so
        that weighted gradients stay within the range of float16.

    Raises:
      ConfigError: The pipeline is not called exactly once, or an input other than x depends on
        weights.
    """

    def __init__(
        self, loss: Callable[..., tuple], params: PyTree, num_microbatches: int, full_weight: float
    ):
        self._full_weight = full_weight
        self._loss, self._num_microbatches = loss, num_microbatches
        self._params, self._form = jax.tree.flatten(params)
        self._call: dict[str, Any] = {}  # Arguments of the pipeline's call that are not arrays.
        x, *_ = jax.eval_shape(self._pipeline_args, self._params, jnp.array(0))
        if any(self._used(lambda params: self._pipeline_args(params, 0)[1])):
            raise ConfigError(
                "OneForwardOneBackward requires that only the first input of the Pipeline depends "
                "on weights, but other inputs depend on weights as well, such as the outputs of an "
                "encoder. Omit the Partitioner's `gradients`."
            )
        before = self._used(lambda params: self._pipeline_args(params, 0)[0])
        after = self._used(
            lambda params: self._loss_of_output(params, 0, jnp.zeros(x.shape, x.dtype), {})
        )
        at_ends = [any(are_used) for are_used in zip(before, after, strict=True)]
        self._ends = [i for i, is_used in enumerate(at_ends) if is_used]

    def parts(self) -> tuple[StageWork, "SplitModel", list[jax.Array], jax.Array | None]:
        """Returns the arguments (work, ends, arrays, keys_M) of InterleavedTicks."""
        leaves = self._leaves(self._params)
        _, inputs_M, keys_M = jax.lax.map(
            lambda microbatch: (0, *self._pipeline_args(self._params, microbatch)[1:]),
            jnp.arange(self._num_microbatches),
        )
        pipeline, inputs, inputs_form = self._call["pipeline"], *jax.tree.flatten(inputs_M)
        work = StageWork(
            self._call["form"],
            len(leaves),
            inputs_form,
            self._call["others"],
            pipeline.num_stages,
            pipeline.num_layers // pipeline.circular_repeat,
            pipeline.layout,
        )
        return work, self, work.arrays(leaves, inputs), keys_M

    def grad_params(self, grad_leaves: dict[int, jax.Array], grad_ends: list[jax.Array]) -> PyTree:
        """Adds up the gradients of the blocks and ends into float32 gradients for all weights."""
        indices = list(grad_leaves)

        def floats(params: list) -> list[jax.Array]:
            leaves = self._leaves(params)
            return [leaves[i] for i in indices]

        leaves, vjp_fn = jax.vjp(floats, self._params)
        grads = [jnp.zeros(w.shape, jnp.float32) for w in self._params]
        remainders = list(grad_leaves.values())
        # If `vjp_fn` casts to 16 bits, each gradient is passed as a sum of three 16-bit terms, so
        # that the cast does not round it.
        num_parts = 3 if any(leaf.dtype != jnp.float32 for leaf in leaves) else 1
        for _ in range(num_parts):
            parts = [rest.astype(leaf.dtype) for rest, leaf in zip(remainders, leaves, strict=True)]
            remainders = [
                a - part.astype(a.dtype) for a, part in zip(remainders, parts, strict=True)
            ]
            grads = [a + g.astype(jnp.float32) for a, g in zip(grads, *vjp_fn(parts), strict=True)]
        for i, g in zip(self._ends, grad_ends, strict=True):
            grads[i] += g
        return jax.tree.unflatten(self._form, grads)

    def enter(self, microbatch: jax.Array) -> jax.Array:
        """Returns the pipeline's input x for a microbatch."""
        return self._pipeline_args(self._params, microbatch)[0]

    def enter_gradient(self, microbatch: jax.Array, grad_x: jax.Array) -> list[jax.Array]:
        """Backpropagates the gradient of x to the ends' weights."""
        ends = [self._params[i] for i in self._ends]
        _, vjp_fn = jax.vjp(lambda ends: self._pipeline_args(self._with(ends), microbatch)[0], ends)
        return vjp_fn(grad_x)[0]

    def leave(self, microbatch: jax.Array, x: jax.Array, values: Values) -> tuple:
        """Returns (metrics, weight, grad_x, grad_ends, grad_values) for a microbatch.

        The weight is a float32 scalar. The gradients are multiplied by the weight, and may be NaN
        if the weight is 0.

        Args:
          microbatch: Index of the microbatch.
          x: Output of the pipeline.
          values: Values assigned by the blocks, [R, S, P, ...]; only float values have gradients.
        """
        ends = [self._params[i] for i in self._ends]
        floats = {path: value for path, value in values.items() if floats_of([value])}

        def loss_of(
            ends: list[jax.Array], x: jax.Array, floats: Values
        ) -> tuple[jax.Array, dict[str, Any]]:
            return self._loss_of_output(self._with(ends), microbatch, x, values | floats)

        loss, vjp_fn, metrics = jax.vjp(loss_of, ends, x, floats, has_aux=True)
        weight = metrics["loss"][1].astype(jnp.float32) / self._full_weight
        if self._num_microbatches == 1:  # A single microbatch is not weighted.
            weight = jnp.ones_like(weight)
        # Backpropagate the weight instead of 1, to multiply all gradients by it.
        grad_ends, grad_x, grad_values = vjp_fn(weight.astype(loss.dtype))
        return metrics, weight, grad_x, grad_ends, grad_values

    def _with(self, ends: list[jax.Array]) -> list[jax.Array]:
        params = list(self._params)
        for i, weight in zip(self._ends, ends, strict=True):
            params[i] = weight
        return params

    def _used(self, function: Callable[[list], PyTree]) -> list[bool]:
        return used_arguments(function, [self._params])

    def _cut(
        self, params: list, microbatch: Any, cut: Callable[..., jax.Array], values: Values
    ) -> tuple:
        """Runs the model with `cut` instead of the blocks.

        Args:
          params: Leaves of the weights.
          microbatch: Index of the microbatch.
          cut: Takes the pipeline's input x, and returns its output.
          values: Values to assign to the blocks' variables.

        Returns:
          (result of the loss function, arguments of the pipeline's call).
        """
        calls = []

        def record(pipeline: Any, x: jax.Array, key: Any, inputs: dict) -> jax.Array:
            calls.append((pipeline, x, key, inputs))
            assign(pipeline.blocks, pipeline.off_stages(values))
            return cut(x)

        # Inside, the pipeline calls `record` instead of running its blocks.
        with cutting(record):
            result = self._loss(jax.tree.unflatten(self._form, params), microbatch)
        if len(calls) != 1:
            raise ConfigError(
                "OneForwardOneBackward requires that each pass calls the Pipeline exactly once, "
                f"but the number of calls was {len(calls)}. Omit the Partitioner's `gradients`."
            )
        return result, calls[0]

    def _loss_of_output(self, params: list, microbatch: Any, x: jax.Array, values: Values) -> tuple:
        """Returns the loss and metrics, given the pipeline's output and its assigned values."""
        return self._cut(params, microbatch, lambda _: x, values)[0]

    def _pipeline_args(self, params: list, microbatch: Any) -> tuple[jax.Array, PyTree, Any]:
        """Returns the arguments (x, inputs, key) that the model passes to the pipeline."""
        # Only the arguments matter, so the pipeline may return its input.
        _, (pipeline, x, key, inputs) = self._cut(params, microbatch, lambda x: x, {})
        arrays, others = arrays_of(inputs, x.shape[0])
        scalars = {name: value for name, value in others.items() if isinstance(value, jax.Array)}
        self._call |= dict(
            pipeline=pipeline,
            others={name: value for name, value in others.items() if name not in scalars},
        )
        return x, {**arrays, **scalars}, key

    def _leaves(self, params: list) -> list[jax.Array]:
        """Returns the arrays of the blocks, [R, S, P, ...]."""
        _, (pipeline, *_) = self._cut(params, 0, lambda x: x, {})
        leaves, form = jax.tree.flatten(pipeline.on_stages(pipeline.blocks))
        self._call |= dict(form=form)
        return leaves
