"""Splits a model at its pipeline into functions for the parts before and after it.

While a cut is active, a Pipeline that is called without a cache calls the cut instead of its
blocks. So layers and tasks need not declare where to split the model: each function traces the
complete model, and what its results do not need is dead code.
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

# R repeats, S stages, P layers of one stage in one repeat, M microbatches.

PyTree = Any

# (pipeline, x, key, inputs) -> x.
Cut = Callable[[Any, Any, Any, dict[str, Any]], Any]

_CUT: contextvars.ContextVar[Cut | None] = contextvars.ContextVar("cut", default=None)


def active_cut() -> Cut | None:
    """Returns the function that replaces calls of pipelines, or None."""
    return _CUT.get()


@contextlib.contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """Activates a cut in the body."""
    token = _CUT.set(cut)
    try:
        yield
    finally:
        _CUT.reset(token)


def in_one_microbatch() -> contextlib.AbstractContextManager[None]:
    """Makes pipelines process all rows of a call as one microbatch, in the body."""
    return cutting(lambda pipeline, x, key, inputs: pipeline.apply_in_microbatches(
        x, 1, key=key, cache=None, **inputs
    )[0])


class SplitModel:
    """A model's loss of a microbatch, split into `enter`, before its pipeline, and `leave`.

    Weights that are used at both ends, such as a tied embedding, get the sum of both gradients.

    Args:
      loss: (params, microbatch) -> (loss, metrics).
      params: The weights.
      num_microbatches: M.
      full_weight: Expected weight of a microbatch. Weights are divided by it, so that weighted
        gradients have the size of the loss's, which matters for the range of float16.

    Raises:
      ConfigError: The pipeline is not called exactly once, or its inputs other than x depend on
        weights.
    """

    def __init__(
        self, loss: Callable[..., tuple], params: PyTree, num_microbatches: int, full_weight: float
    ):
        self._full_weight = full_weight
        self._loss, self._num_microbatches = loss, num_microbatches
        self._params, self._form = jax.tree.flatten(params)
        self._call: dict[str, Any] = {}  # Arguments of the pipeline's call that are not arrays.
        x, *_ = jax.eval_shape(self._called, self._params, jnp.array(0))
        if any(self._used(lambda params: self._called(params, 0)[1])):
            raise ConfigError(
                "OneForwardOneBackward: inputs of the Pipeline other than x depend on weights, "
                "such as an encoder's; expected inputs that depend only on data. Omit the "
                "Partitioner's gradients."
            )
        before = self._used(lambda params: self._called(params, 0)[0])
        behind = self._used(lambda params: self._left(params, 0, jnp.zeros(x.shape, x.dtype), {}))
        at_ends = [any(are_used) for are_used in zip(before, behind, strict=True)]
        self._ends = [i for i, is_used in enumerate(at_ends) if is_used]

    def parts(self) -> tuple[StageWork, "SplitModel", list[jax.Array], jax.Array | None]:
        """Returns (the stages' work, self, the arrays of the work, the microbatches' keys)."""
        leaves = self._leaves(self._params)
        _, inputs_M, keys_M = jax.lax.map(
            lambda microbatch: (0, *self._called(self._params, microbatch)[1:]),
            jnp.arange(self._num_microbatches),
        )
        pipeline, inputs, inputs_form = self._call["pipeline"], *jax.tree.flatten(inputs_M)
        work = StageWork(
            self._call["form"], len(leaves), inputs_form, self._call["others"],
            pipeline.num_stages, pipeline.num_layers // pipeline.circular_repeat, pipeline.layout,
        )
        return work, self, work.arrays(leaves, inputs), keys_M

    def grad_params(self, grad_leaves: dict[int, jax.Array], grad_ends: list[jax.Array]) -> PyTree:
        """Combines gradients of blocks and ends to float32 gradients of the model's weights."""
        numbers = list(grad_leaves)

        def floats(params: list) -> list[jax.Array]:
            leaves = self._leaves(params)
            return [leaves[i] for i in numbers]

        leaves, pull = jax.vjp(floats, self._params)
        grads = [jnp.zeros(w.shape, jnp.float32) for w in self._params]
        rests = list(grad_leaves.values())
        # A cast to 16 bits in between would round gradients; they pass through it in three parts.
        num_parts = 3 if any(leaf.dtype != jnp.float32 for leaf in leaves) else 1
        for _ in range(num_parts):
            parts = [rest.astype(leaf.dtype) for rest, leaf in zip(rests, leaves, strict=True)]
            rests = [a - part.astype(a.dtype) for a, part in zip(rests, parts, strict=True)]
            grads = [a + g.astype(jnp.float32) for a, g in zip(grads, *pull(parts), strict=True)]
        for i, g in zip(self._ends, grad_ends, strict=True):
            grads[i] += g
        return jax.tree.unflatten(self._form, grads)

    # The ends.

    def enter(self, microbatch: jax.Array) -> jax.Array:
        """Returns the input x of the pipeline."""
        return self._called(self._params, microbatch)[0]

    def enter_gradient(self, microbatch: jax.Array, grad_x: jax.Array) -> list[jax.Array]:
        """Returns the gradients of the ends' weights through x."""
        ends = [self._params[i] for i in self._ends]
        _, pull = jax.vjp(lambda ends: self._called(self._with(ends), microbatch)[0], ends)
        return pull(grad_x)[0]

    def leave(self, microbatch: jax.Array, x: jax.Array, values: Values) -> tuple:
        """Returns (metrics, weight, gradients of x, of the ends' weights and of values).

        The gradients are multiplied by the weight, a float32 scalar; they may be NaN if it is 0.

        Args:
          microbatch: Index of the microbatch.
          x: Output of the pipeline.
          values: Values assigned by the blocks, [R, S, P, ...]; float ones have a gradient.
        """
        ends = [self._params[i] for i in self._ends]
        floats = {path: value for path, value in values.items() if floats_of([value])}

        def left(
            ends: list[jax.Array], x: jax.Array, floats: Values
        ) -> tuple[jax.Array, dict[str, Any]]:
            return self._left(self._with(ends), microbatch, x, values | floats)

        loss, pull, metrics = jax.vjp(left, ends, x, floats, has_aux=True)
        weight = metrics["loss"][1].astype(jnp.float32) / self._full_weight
        if self._num_microbatches == 1:  # A single microbatch is not weighted.
            weight = jnp.ones_like(weight)
        grad_ends, grad_x, grad_values = pull(weight.astype(loss.dtype))
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
        calls = []

        def record(pipeline: Any, x: jax.Array, key: Any, inputs: dict) -> jax.Array:
            calls.append((pipeline, x, key, inputs))
            assign(pipeline.blocks, pipeline.off_stages(values))
            return cut(x)

        with cutting(record):
            result = self._loss(jax.tree.unflatten(self._form, params), microbatch)
        if len(calls) != 1:
            raise ConfigError(
                f"OneForwardOneBackward: a pass calls the Pipeline {len(calls)} times; expected "
                "once. Omit the Partitioner's gradients."
            )
        return result, calls[0]

    def _left(self, params: list, microbatch: Any, x: jax.Array, values: Values) -> tuple:
        """Returns the loss and metrics, given the pipeline's output and its blocks' values."""
        return self._cut(params, microbatch, lambda _: x, values)[0]

    def _called(self, params: list, microbatch: Any) -> tuple[jax.Array, PyTree, Any]:
        """Returns the pipeline's x, inputs and key."""
        _, (pipeline, x, key, inputs) = self._cut(params, microbatch, lambda x: x, {})
        arrays, others = arrays_of(inputs, x.shape[0])
        scalars = {
            name: value for name, value in others.items() if isinstance(value, jax.Array)
        }
        self._call |= dict(
            pipeline=pipeline,
            others={name: value for name, value in others.items() if name not in scalars},
        )
        return x, {**arrays, **scalars}, key

    def _leaves(self, params: list) -> list[jax.Array]:
        """Returns the blocks' arrays, [R, S, P, ...]."""
        _, (pipeline, *_) = self._cut(params, 0, lambda x: x, {})
        leaves, form = jax.tree.flatten(pipeline.on_stages(pipeline.blocks))
        self._call |= dict(form=form)
        return leaves
