"""A loss that is a plain function, for a model of any kind."""

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

    `model` is what `Model.module` returns: an NNX module, a bound Linen module, the params of a
    `FunctionModel`. `inputs` is a batch, name -> array [B, ...]; `key` is None in evaluation.

    A loss returns the loss, or (loss, {name: metric}). Each of them is one of
      - an array of the shape of inputs["weights"] (a value per row, or per token): its mean is
        taken with those weights, so that padding rows (weight 0) do not count; --mode=eval
        also writes it, a line per row;
      - a scalar: a mean that the loss has taken itself, which weighs sum(inputs["weights"]). If
        a batch may have padding rows, take sum(x * weights) / sum(weights);
      - a pair of scalars (value, weight): a mean over something else than rows.
    A batch without "weights" has weight 1 for each row.

    Args:
      model, learner, weight_sharding, inputs_split_mapping, fprop_dtype, metrics: see Task. What
        the loss returned is shared with the metrics by name, and what it shares itself.
      loss: what training minimises.
      eval_loss: a loss for evaluations that draw random numbers, with the `key` of
        `Task.compute_eval_loss`. None: `loss`, without a key.
      predict: returns an array [B, ...] or a dict of them, written for each row by --mode=decode.
      required_inputs: keys that batches of `datasets` must have.

    Raises:
      ConfigError: a function does not take three arguments, or, while a step is traced, returns
        something else; names it.
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
            model, learner,
            weight_sharding=weight_sharding, inputs_split_mapping=inputs_split_mapping,
            fprop_dtype=fprop_dtype, metrics=metrics,
        )
        functions = {"loss": loss, "eval_loss": eval_loss, "predict": predict}
        for setting, function in functions.items():
            if function is not None:
                check_takes(f"LossTask.{setting}", function, "model", "inputs", "key")
        is_keys = not isinstance(required_inputs, str)
        require(is_keys, "LossTask.required_inputs", required_inputs, "keys in brackets")
        self.loss, self.eval_loss, self.predict = loss, eval_loss, predict
        self.required_inputs = tuple(required_inputs)

    def compute_loss(self, model: Any, inputs: Batch, key: jax.Array | None) -> WeightedScalars:
        """Returns what the loss does, each as (mean, weight): "loss", and metrics by name."""
        return self._outputs(self.loss, model, inputs, key)[0]

    def compute_eval_loss(self, model: Any, inputs: Batch, key: jax.Array) -> LossOutputs:
        """Returns the means as `compute_loss`, and what has a value for each weight."""
        if self.eval_loss is not None:
            return self._outputs(self.eval_loss, model, inputs, key)
        if type(self).compute_loss is not LossTask.compute_loss:
            return super().compute_eval_loss(model, inputs, key)  # By the subclass's own.
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
                f"{function_name(function)} returns a metric called 'loss', which is the name of "
                "the loss itself. Give it another."
            )
        returned = {"loss": loss, **metrics}
        share_outputs(returned)
        scalars, examples = {}, {}
        for name, found in returned.items():
            is_scalar = isinstance(found, int | float) or getattr(found, "shape", None) == ()
            pair = (found, jnp.sum(weights)) if is_scalar else found
            # Two arrays are a loss and a metric without its name, rather than values and weights.
            is_mistaken = isinstance(found, tuple | list) and any(
                getattr(x, "shape", ()) != () for x in found
            )
            scalars[name] = None if is_mistaken else weighted_mean(pair, weights)
            if scalars[name] is None:
                raise ConfigError(
                    f"{function_name(function)} returns {_described(found)} as {name!r}; expected "
                    f"a scalar, a value for each of the weights {weights.shape}, or a pair of "
                    "scalars (value, weight). Take the mean over other dims. Metrics come second, "
                    "in a dict: (loss, {name: metric})."
                )
            if getattr(found, "shape", ()) == weights.shape:
                examples[name] = jnp.asarray(found)
        value = loss[0] if isinstance(loss, tuple | list) else loss
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise ConfigError(
                f"{function_name(function)} returns {_described(value)} as the loss, which has no "
                "gradient; expected floats. Counts can be metrics."
            )
        return scalars, examples

    def decode(self, model: Any, inputs: Batch, key: jax.Array) -> dict[str, jax.Array]:
        """Returns what `predict` does, by name; an array by itself is called "prediction"."""
        if self.predict is None:
            raise ConfigError(
                "LossTask.predict is not set, so there is nothing to decode with. Give the task a "
                "function predict(model, inputs, key) that returns arrays [B, ...]."
            )
        predicted = self.predict(model, inputs, key)
        outputs = predicted if isinstance(predicted, Mapping) else {"prediction": predicted}
        num_rows = num_rows_of(inputs)
        for name, x in outputs.items():
            if not hasattr(x, "shape") or x.shape[:1] != (num_rows,):
                raise ConfigError(
                    f"{function_name(self.predict)} returns {_described(x)} as {name!r}; expected "
                    f"an array with the {num_rows} rows of the batch first, or a dict of them."
                )
        return dict(outputs)

    def decode_to_records(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Returns a record per real row with the predictions by name: numbers, or lists of them."""
        return records_of(outputs, is_true_row(inputs))


def _described(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"{type(x).__name__} of {len(x)} ({', '.join(map(_described, x))})"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{tuple(x.shape)}"
    return f"a value of type {type(x).__name__}"
