"""Metrics of a batch: pairs of a value and its weight, a task's own and those an experiment adds.

Means over micro-batches, devices, hosts and evaluation sets weigh each value by its weight.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.callables import check_takes, function_name
from praxis_lite.core.errors import ConfigError, did_you_mean, require

# (outputs, inputs) -> values for the weights of the batch, or (values, weights).
Metric = Callable[[Mapping[str, Any], Mapping[str, jax.Array]], Any]
Pairs = dict[str, tuple[jax.Array, jax.Array]]

_shared: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "_shared", default=None
)


def share_outputs(outputs: Mapping[str, Any]) -> None:
    """Gives arrays of a pass, such as logits, to the metrics of its task (`Task.metrics`).

    A task calls it in `compute_loss`, and a loss function may; where nobody reads an array it costs
    nothing. Call it outside of scans and remat, whose arrays do not leave them.
    """
    shared = _shared.get()
    if shared is not None:
        shared.update(outputs)


@contextlib.contextmanager
def sharing() -> Iterator[dict[str, Any]]:
    """Yields a dict that has, after the body, what was shared in it."""
    token = _shared.set({})
    try:
        yield _shared.get()
    finally:
        _shared.reset(token)


def check_metrics(task: str, metrics: Any) -> dict[str, Metric]:
    """Returns a task's metrics; raises ConfigError unless they are functions by name."""
    expected = '{"entropy": fdl.Partial(entropy)}, a function of (outputs, inputs) for each name'
    is_named = isinstance(metrics, Mapping) and all(
        isinstance(name, str) and name for name in metrics
    )
    require(metrics is None or is_named, f"{task}.metrics", metrics, expected)
    for name, function in (metrics or {}).items():
        check_takes(f"{task}.metrics[{name!r}]", function, "outputs", "inputs")
    return dict(metrics or {})


def values_of(
    task: str, metrics: Mapping[str, Metric], outputs: Mapping[str, Any],
    inputs: Mapping[str, jax.Array], before: Mapping[str, Any],
) -> Pairs:
    """Returns the (value, weight) of each metric; no gradient is taken through them.

    Args:
      task: its name.
      outputs: what the task has shared of the pass.
      inputs: the batch.
      before: the task's own metrics.

    Raises:
      ConfigError: a metric has the name of one of the task's, reads what is not there, or returns
        no value for each weight and no pair; names it.
    """
    pairs = {}
    if metrics:
        outputs = jax.tree.map(
            lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x, dict(outputs)
        )
    for name, function in metrics.items():
        where = f"{task}.metrics[{name!r}], {function_name(function)},"
        if name in before:
            raise ConfigError(
                f"{where} has the name of a metric that {task} reports itself: it has "
                f"{sorted(before)}. Give it another name."
            )
        actual = function(
            _Named(f"{where} reads outputs", f"{task} shares (share_outputs)", outputs),
            _Named(f"{where} reads inputs", "a batch has", inputs),
        )
        pairs[name] = weighted_mean(actual, weights_of(inputs))
        if pairs[name] is None:
            raise ConfigError(
                f"{where} returns {kind_of(actual)}; expected is a value for each of the weights "
                f"{list(weights_of(inputs).shape)} of the batch, or a pair (values, weights) of "
                "two scalars or of two arrays of one shape, a row for each of the batch's. A mean "
                "by itself would count rows of padding: return what it is the mean of."
            )
    return pairs


class _Named(dict):
    """A dict whose error for a missing key names the metric that reads it."""

    def __init__(self, reads: str, has: str, values: Mapping[str, Any]):
        super().__init__(values)
        self._reads, self._has = reads, has

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"{self._reads}[{key!r}], but {self._has} {sorted(self) or 'nothing'}."
            f"{did_you_mean(str(key), self)}"
        )


def weights_of(inputs: Mapping[str, Any]) -> jax.Array:
    """Returns a batch's weights, [B, ...] in float32; if it has none, 1 for each row."""
    if "weights" in inputs:
        return inputs["weights"].astype(jnp.float32)
    rows = [jnp.shape(x)[:1] for x in jax.tree.leaves(dict(inputs)) if jnp.ndim(x)]
    return jnp.ones(rows[0] if rows else (), jnp.float32)


def weighted_mean(found: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Returns (mean, weight) in float32 of values for the weights, or None if it has no such form.

    Rows of padding, of which all weights are 0, count for nothing, whatever weights come with the
    values; a pair of scalars is taken as it is.

    Args:
      found: values of the shape of `weights`; or a pair of two scalars, or of two arrays of one
        shape, [B, ...]: values and weights of their own.
      weights: the batch's, [B, ...].
    """
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    value, weight = [_real(x) for x in (found if is_pair else (found, weights))]
    if value is None or weight is None or value.shape != weight.shape:
        return None
    if value.ndim == 0:
        return (value, weight) if is_pair else None
    if value.shape[:1] != weights.shape[:1]:
        return None
    if is_pair:
        is_row = jnp.any(weights != 0, axis=tuple(range(1, weights.ndim)))
        weight = jnp.where(is_row.reshape(-1, *[1] * (value.ndim - 1)), weight, 0.0)
    total = jnp.sum(weight)
    weighted_sum = jnp.sum(jnp.where(weight != 0, value * weight, 0.0))
    return weighted_sum / jnp.where(total == 0, 1.0, total), total


def _real(x: Any) -> jax.Array | None:
    """Returns `x` as float32, or None if it is not a real number or an array of them."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int):
        return None
    x = jnp.asarray(x)
    is_real = any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool))
    return x.astype(jnp.float32) if is_real else None


_WANTED = (
    'wanted is a pair (value, weight) of scalars for each name, "loss" among them: return '
    '{"loss": (loss, weight)}, where the weight is what the loss is a mean over, such as '
    'jnp.sum(inputs["weights"]) or the number of rows'
)


def checked_scalars(name: str, found: Any) -> Pairs:
    """Returns the result of the function `name`; ConfigError unless it is pairs with a loss."""
    if not isinstance(found, Mapping) or "loss" not in found:
        names = f"{sorted(found)} without 'loss'" if isinstance(found, Mapping) else kind_of(found)
        raise ConfigError(f"{name} returns {names}; {_WANTED}.")
    for metric, pair in found.items():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(map(_is_scalar, pair)):
            raise ConfigError(
                f"{name} returns {kind_of(pair)} as {metric!r}; {_WANTED}. What is to be written "
                "for each row is a per-example output: return "
                f"(metrics, {{{metric!r}: ...}})."
            )
    if not jnp.issubdtype(jnp.result_type(found["loss"][0]), jnp.floating):
        raise ConfigError(
            f"{name} returns {kind_of(found['loss'][0])} as the loss, which has no gradient; "
            "wanted is a float. Counts can be other metrics."
        )
    return dict(found)


def _is_scalar(result: Any) -> bool:
    return isinstance(result, int | float) or getattr(result, "shape", None) == ()


def kind_of(found: Any) -> str:
    """Returns the kind of a value, in words: "float32[7, 3]", "a tuple of (...)", "None"."""
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of ({', '.join(map(kind_of, found))})"
    if hasattr(found, "dtype") and hasattr(found, "shape"):
        return f"{found.dtype}{list(found.shape)}"
    return "None" if found is None else f"a {type(found).__name__}"
