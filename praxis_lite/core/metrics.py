"""Computes metrics for a batch as (value, weight) pairs, including user-defined metrics.

Means over microbatches, devices, hosts and evaluation sets are weighted by these weights.
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

# (outputs, inputs) -> values with the shape of the batch's weights, or a pair (values, weights).
Metric = Callable[[Mapping[str, Any], Mapping[str, jax.Array]], Any]
Pairs = dict[str, tuple[jax.Array, jax.Array]]

_shared: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "_shared", default=None
)


def share_outputs(outputs: Mapping[str, Any]) -> None:
    """Makes intermediate arrays, such as logits, available to the metrics in `Task.metrics`.

    Call this in `compute_loss` or in a loss function, but outside scans and remat, because arrays
    cannot leave the bodies of these functions. Arrays that are not used by any metric cost nothing.
    """
    shared = _shared.get()
    if shared is not None:
        shared.update(outputs)


@contextlib.contextmanager
def collect_shared_outputs() -> Iterator[dict[str, Any]]:
    """Yields a dict of the arrays that are passed to `share_outputs` in the body."""
    shared: dict[str, Any] = {}
    token = _shared.set(shared)
    try:
        yield shared
    finally:
        _shared.reset(token)


def check_metrics(task: str, metrics: Any) -> dict[str, Metric]:
    """Returns the metrics as a dict; raises ConfigError if they do not map names to functions."""
    expected = '{"entropy": fdl.Partial(entropy)}, a function of (outputs, inputs) for each name'
    is_named = isinstance(metrics, Mapping) and all(
        isinstance(name, str) and name for name in metrics
    )
    require(metrics is None or is_named, f"{task}.metrics", metrics, expected)
    for name, function in (metrics or {}).items():
        check_takes(f"{task}.metrics[{name!r}]", function, "outputs", "inputs")
    return dict(metrics or {})


def compute_metrics(
    task: str,
    metrics: Mapping[str, Metric],
    outputs: Mapping[str, Any],
    inputs: Mapping[str, jax.Array],
    before: Mapping[str, Any],
) -> Pairs:
    """Returns a (value, weight) pair for each user-defined metric, without gradients.

    Args:
      task: Name of the task, for messages.
      metrics: User-defined metrics, keyed by name.
      outputs: Arrays that the task shared during the forward pass.
      inputs: The batch.
      before: Metrics that the task returned, keyed by name.

    Raises:
      ConfigError: A metric has the same name as one of the task's metrics, reads a missing key, or
        returns neither a value per weight nor a valid pair. The message names the metric.
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
                f"{where} has the same name as one of the metrics that {task} already reports: "
                f"{sorted(before)}. Rename the user-defined metric."
            )
        actual = function(
            _Named(f"{where} reads outputs", f"{task} passes to share_outputs", outputs),
            _Named(f"{where} reads inputs", "a batch has", inputs),
        )
        pair = weighted_mean(actual, weights_of(inputs))
        if pair is None:
            raise ConfigError(
                f"{where} returns {kind_of(actual)}; expected values with the shape of the batch's "
                f"weights, {list(weights_of(inputs).shape)}, or a pair (values, weights) of two "
                "scalars or of two arrays with a row per example. Return the values before "
                "averaging, because a mean would include padding rows."
            )
        pairs[name] = pair
    return pairs


class _Named(dict[str, Any]):
    """A dict that raises an error with the metric's name if a key is missing."""

    def __init__(self, reader: str, provider: str, values: Mapping[str, Any]):
        super().__init__(values)
        self._reader, self._provider = reader, provider

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"{self._reader}[{key!r}], but {self._provider} {sorted(self) or 'nothing'}."
            f"{did_you_mean(str(key), self)} Change the key."
        )


def weights_of(inputs: Mapping[str, Any]) -> jax.Array:
    """Returns the float32 weights [B, ...] of a batch, or ones [B] if the batch has no weights."""
    if "weights" in inputs:
        weights: jax.Array = inputs["weights"].astype(jnp.float32)
        return weights
    rows = [jnp.shape(x)[:1] for x in jax.tree.leaves(dict(inputs)) if jnp.ndim(x)]
    return jnp.ones(rows[0] if rows else (), jnp.float32)


def weighted_mean(found: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Returns the float32 (mean, weight) of a metric's result, or None if the result is invalid.

    Padding rows, whose weights are all 0, are ignored, even if the metric returns nonzero weights
    for them. A pair of scalars is returned unchanged.

    Args:
      found: Values with the shape of `weights`, or a pair (values, weights) of two scalars or of
        two arrays [B, ...] of equal shape.
      weights: Weights [B, ...] of the batch.
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
    """Returns `x` as a float32 array, or None if it is not real-valued."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int):
        return None
    x = jnp.asarray(x)
    is_real = any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool))
    return x.astype(jnp.float32) if is_real else None


_EXPECTED = (
    'expected a pair (value, weight) of scalars per name, including "loss": return '
    '{"loss": (loss, weight)}, where the weight is the total weight that the loss is averaged '
    'over, such as jnp.sum(inputs["weights"]) or the number of rows'
)


def checked_scalars(name: str, found: Any) -> Pairs:
    """Checks that a function returned (value, weight) pairs including "loss", and returns them.

    Args:
      name: Name of the function, for messages.
      found: Result of the function: a (value, weight) pair of scalars per metric.

    Raises:
      ConfigError: The result has a different structure, or the loss is not a float.
    """
    if not isinstance(found, Mapping) or "loss" not in found:
        names = f"{sorted(found)} without 'loss'" if isinstance(found, Mapping) else kind_of(found)
        raise ConfigError(f"{name} returns {names}; {_EXPECTED}.")
    for metric, pair in found.items():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(map(_is_scalar, pair)):
            raise ConfigError(
                f"{name} returns {kind_of(pair)} as {metric!r}; {_EXPECTED}. To write one value "
                "per row, return per-example outputs: "
                f"(metrics, {{{metric!r}: ...}})."
            )
    if not jnp.issubdtype(jnp.result_type(found["loss"][0]), jnp.floating):
        raise ConfigError(
            f"{name} returns {kind_of(found['loss'][0])} as the loss, which has no gradient; "
            "expected a float. If this is a count, return it as an additional metric."
        )
    return dict(found)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or getattr(value, "shape", None) == ()


def kind_of(found: Any) -> str:
    """Describes the type of a value, such as "float32[7, 3]", "a tuple of (...)" or "None"."""
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of ({', '.join(map(kind_of, found))})"
    if hasattr(found, "dtype") and hasattr(found, "shape"):
        return f"{found.dtype}{list(found.shape)}"
    return "None" if found is None else f"a {type(found).__name__}"
