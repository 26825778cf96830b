"""LossTask: trains any model on a loss that is a plain function."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from praxis_lite.core import (
    ConfigError,
    InputsSplitMapping,
    Learner,
    LossOutputs,
    Metric,
    Model,
    Task,
    WeightedScalars,
    WeightSharding,
    check_takes,
    function_name,
    is_true_row,
    num_rows_of,
    records_of,
    require,
    share_outputs,
    weighted_mean,
    weights_of,
)

__all__ = ["LossTask"]

# B batch.
Batch = Mapping[str, jax.Array]


class LossTask(Task):
    """Trains any model on `loss(model, inputs, key)`; decodes with `predict(model, inputs, key)`.

    `model` is the result of `Model.module`: an NNX module, a bound Linen module, or the params of
    a `FunctionModel`. `inputs` is a batch, a dict of arrays [B, ...]. `key` is None in evaluation.

    A loss function returns the loss, or (loss, {name: metric}). The loss and each metric must be
    one of:
      - an array with the shape of inputs["weights"] (a value per row or token). Its weighted mean
        ignores padding rows (weight 0), and `praxis eval` also writes the values of each row.
      - a scalar, which is treated as a mean with the weight sum(inputs["weights"]). If a batch may
        contain padding rows, return sum(x * weights) / sum(weights).
      - a pair of scalars (value, weight), for a mean with a different weight.
    If a batch has no "weights", each row has weight 1.

    Args:
      model: See Task.
      loss: Loss function that training minimizes.
      learner: See Task.
      eval_loss: Loss function for evaluations that need random numbers. It is called with the `key`
        passed to `Task.compute_eval_loss`. If None, `loss` is called without a key.
      predict: Function that returns an array [B, ...] or a dict of arrays, which `praxis decode`
        writes for each row.
      weight_sharding: See Task.
      inputs_split_mapping: See Task.
      fprop_dtype: See Task.
      required_inputs: Keys that batches of `datasets` must contain.
      metrics: See Task. Metrics receive the values that the loss function returns or passes to
        `share_outputs`, keyed by name.

    Raises:
      ConfigError: A function does not take three arguments, or returns an unsupported value while a
        step is being traced. The message names the function.
    """

    def __init__(
        self,
        model: Model | Callable[..., nnx.Module],
        loss: Callable[[Any, Batch, jax.Array | None], Any],
        learner: Learner,
        *,
        eval_loss: Callable[[Any, Batch, jax.Array], Any] | None = None,
        predict: Callable[[Any, Batch, jax.Array], Any] | None = None,
        weight_sharding: WeightSharding | None = None,
        inputs_split_mapping: InputsSplitMapping = None,
        fprop_dtype: jnp.dtype | None = None,
        required_inputs: tuple[str, ...] = (),
        metrics: Mapping[str, Metric] | None = None,
    ):
        super().__init__(
            model,
            learner,
            weight_sharding=weight_sharding,
            inputs_split_mapping=inputs_split_mapping,
            fprop_dtype=fprop_dtype,
            metrics=metrics,
        )
        functions = {"loss": loss, "eval_loss": eval_loss, "predict": predict}
        for setting, function in functions.items():
            if function is not None:
                check_takes(f"LossTask.{setting}", function, "model", "inputs", "key")
        is_keys = not isinstance(required_inputs, str)
        require(is_keys, "LossTask.required_inputs", required_inputs, "a tuple of keys")
        self.loss, self.eval_loss, self.predict = loss, eval_loss, predict
        self.required_inputs = tuple(required_inputs)

    def compute_loss(self, model: Any, inputs: Batch, key: jax.Array | None) -> WeightedScalars:
        """Returns the loss and the metrics from the loss function, each as (mean, weight)."""
        return self._outputs(self.loss, model, inputs, key)[0]

    def compute_eval_loss(self, model: Any, inputs: Batch, key: jax.Array) -> LossOutputs:
        """Returns the means from `compute_loss`, and the arrays with a value for each weight."""
        if self.eval_loss is not None:
            return self._outputs(self.eval_loss, model, inputs, key)
        if type(self).compute_loss is not LossTask.compute_loss:
            # Call the base class, because it calls compute_loss, which a subclass overrides.
            return super().compute_eval_loss(model, inputs, key)
        return self._outputs(self.loss, model, inputs, None)

    def _outputs(
        self, function: Callable[..., Any], model: Any, inputs: Batch, key: jax.Array | None
    ) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, jax.Array]]:
        loss, metrics = function(model, inputs, key), {}
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping):
            loss, metrics = loss
        weights = weights_of(inputs)
        if "loss" in metrics:
            raise ConfigError(
                f"{function_name(function)} returns a metric with the reserved name 'loss'. Rename "
                "the metric."
            )
        returned = {"loss": loss, **metrics}
        share_outputs(returned)
        scalars, examples = {}, {}
        for name, actual in returned.items():
            is_scalar = isinstance(actual, int | float) or getattr(actual, "shape", None) == ()
            pair = (actual, jnp.sum(weights)) if is_scalar else actual
            # A pair of arrays is probably a loss with an unnamed metric, not values with weights.
            is_mistake = isinstance(actual, tuple | list) and any(
                getattr(x, "shape", ()) != () for x in actual
            )
            scalars[name] = None if is_mistake else weighted_mean(pair, weights)
            if scalars[name] is None:
                raise ConfigError(
                    f"{function_name(function)} returns {_describe(actual)} as {name!r}; expected "
                    f"a scalar, an array with the shape {weights.shape} of the weights, or a pair "
                    "of scalars (value, weight). Take the mean over other dims, and return metrics "
                    "as (loss, {name: metric})."
                )
            if getattr(actual, "shape", ()) == weights.shape:
                examples[name] = jnp.asarray(actual)
        value = loss[0] if isinstance(loss, tuple | list) else loss
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise ConfigError(
                f"{function_name(function)} returns {_describe(value)} as the loss; expected a "
                "float dtype, which has a gradient. Return counts as metrics."
            )
        return scalars, examples

    def decode(self, model: Any, inputs: Batch, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the outputs of `predict`, keyed by name; a single array is named "prediction"."""
        if self.predict is None:
            raise ConfigError(
                "LossTask.predict is None; decoding requires a function predict(model, inputs, "
                "key) that returns arrays [B, ...]."
            )
        predicted = self.predict(model, inputs, key)
        outputs = predicted if isinstance(predicted, Mapping) else {"prediction": predicted}
        num_rows = num_rows_of(inputs)
        for name, x in outputs.items():
            if not hasattr(x, "shape") or x.shape[:1] != (num_rows,):
                raise ConfigError(
                    f"{function_name(self.predict)} returns {_describe(x)} as {name!r}; expected "
                    f"an array with {num_rows} rows, like the batch, or a dict of such arrays."
                )
        return dict(outputs)

    def decode_to_records(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Returns a record for each row except padding, with the predictions keyed by name."""
        return records_of(outputs, is_true_row(inputs))


def _describe(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"{type(x).__name__} of {len(x)} ({', '.join(map(_describe, x))})"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{tuple(x.shape)}"
    return f"a value of type {type(x).__name__}"
