"""Splits a model into functions for the parts before and after its pipeline.

While a cut function is active, a Pipeline that is called without a cache calls the cut function
instead of its blocks. Layers and tasks therefore need not declare where to split the model: each
part traces the complete model, and XLA removes the operations that the part does not need.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
        self._params, self._treedef = jax.tree.flatten(params)
        x = jax.eval_shape(self.enter, jnp.array(0))
        if any(self._used(lambda params: self._pipeline_call(params, 0).arrays)):
            raise ConfigError(
                "OneForwardOneBackward requires that only the first input of the Pipeline depends "
                "on weights, but other inputs depend on weights as well, such as the outputs of an "
                "encoder. Omit the Partitioner's `gradients`."
            )
        before = self._used(lambda params: self._pipeline_call(params, 0).x)
        after = self._used(
            lambda params: self._loss_of_output(params, 0, jnp.zeros(x.shape, x.dtype), {})
        )
        at_ends = [any(are_used) for are_used in zip(before, after, strict=True)]
        self._ends = [i for i, is_used in enumerate(at_ends) if is_used]

    def parts(self) -> tuple[StageWork, "SplitModel", list[jax.Array], jax.Array | None]:
        """Returns the arguments (work, ends, arrays, keys_M) of InterleavedTicks."""
        call = self._pipeline_call(self._params, 0)
        pipeline = call.pipeline
        leaves, treedef = jax.tree.flatten(call.blocks)

        def arrays_and_key(microbatch: jax.Array) -> tuple[dict[str, PyTree], jax.Array | None]:
            call = self._pipeline_call(self._params, microbatch)
            return call.arrays, call.key

        inputs_M, keys_M = jax.lax.map(arrays_and_key, jnp.arange(self._num_microbatches))
        inputs, inputs_treedef = jax.tree.flatten(inputs_M)
        work = StageWork(
            treedef,
            len(leaves),
            inputs_treedef,
            call.others,
            pipeline.num_stages,
            pipeline.num_layers // pipeline.circular_repeat,
            pipeline.layout,
        )
        return work, self, work.arrays(leaves, inputs), keys_M

    def grad_params(self, grad_leaves: dict[int, jax.Array], grad_ends: list[jax.Array]) -> PyTree:
        """Adds up the gradients of the blocks and ends into float32 gradients for all weights."""
        indices = list(grad_leaves)

        def floats(params: list) -> list[jax.Array]:
            leaves = jax.tree.leaves(self._pipeline_call(params, 0).blocks)
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
        return jax.tree.unflatten(self._treedef, grads)

    def enter(self, microbatch: jax.Array) -> jax.Array:
        """Returns the pipeline's input x for a microbatch."""
        return self._pipeline_call(self._params, microbatch).x

    def enter_gradient(self, microbatch: jax.Array, grad_x: jax.Array) -> list[jax.Array]:
        """Backpropagates the gradient of x to the ends' weights."""
        ends = [self._params[i] for i in self._ends]
        _, vjp_fn = jax.vjp(lambda ends: self._pipeline_call(self._with(ends), microbatch).x, ends)
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
    ) -> tuple[tuple, "_PipelineCall"]:
        """Runs the model with `cut` instead of the blocks.

        Args:
          params: Leaves of the weights.
          microbatch: Index of the microbatch.
          cut: Takes the pipeline's input x, and returns its output.
          values: Values to assign to the blocks' variables.

        Returns:
          (result of the loss function, the call of the pipeline).
        """
        calls = []

        def record(pipeline: Any, x: jax.Array, key: Any, inputs: dict) -> jax.Array:
            calls.append(_PipelineCall(pipeline, x, key, inputs))
            assign(pipeline.blocks, pipeline.off_stages(values))
            return cut(x)

        # Inside, the pipeline calls `record` instead of running its blocks.
        with cutting(record):
            result = self._loss(jax.tree.unflatten(self._treedef, params), microbatch)
        if len(calls) != 1:
            raise ConfigError(
                "OneForwardOneBackward requires that each pass calls the Pipeline exactly once, "
                f"but the number of calls was {len(calls)}. Omit the Partitioner's `gradients`."
            )
        return result, calls[0]

    def _loss_of_output(self, params: list, microbatch: Any, x: jax.Array, values: Values) -> tuple:
        """Returns the loss and metrics, given the pipeline's output and its assigned values."""
        return self._cut(params, microbatch, lambda _: x, values)[0]

    def _pipeline_call(self, params: list, microbatch: Any) -> "_PipelineCall":
        """Returns the model's call of the pipeline for a microbatch."""
        # Only the arguments matter, so the pipeline may return its input.
        return self._cut(params, microbatch, lambda x: x, {})[1]


class _PipelineCall(NamedTuple):
    """A call of a Pipeline.

    Attributes:
      pipeline: The layer.
      x: The first input.
      key: The random key, or None.
      inputs: The other inputs.
    """

    pipeline: Any
    x: jax.Array
    key: jax.Array | None
    inputs: dict[str, Any]

    @property
    def blocks(self) -> Any:
        """The pipeline's blocks, with arrays [R, S, P, ...]."""
        return self.pipeline.on_stages(self.pipeline.blocks)

    @property
    def arrays(self) -> dict[str, PyTree]:
        """The other inputs that are arrays, with or without a batch dim."""
        return {name: value for name, value in self.inputs.items() if name not in self.others}

    @property
    def others(self) -> dict[str, Any]:
        """The other inputs that are not arrays, such as None and flags."""
        _, others = arrays_of(self.inputs, self.x.shape[0])
        return {name: value for name, value in others.items() if not isinstance(value, jax.Array)}
