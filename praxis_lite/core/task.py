"""HOW a thing is computed: a model, its loss, its metrics, its decoding, and how it learns."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from praxis_lite.core.callables import callable_name, check_takes
from praxis_lite.core.errors import ConfigError, did_you_mean, require
from praxis_lite.core.learner.learner import Learner
from praxis_lite.core.metrics import (
    Metric,
    check_metrics,
    checked_scalars,
    kind_of,
    sharing,
    values_of,
)
from praxis_lite.core.models.model import MdlVars, Model, ShardedWeight
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.sharding.batch_sharding import InputsSplitMapping, num_rows_of
from praxis_lite.core.sharding.weight_sharding import WeightSharding

# A (value, weight) pair per name, both scalars: means over batches, hosts or an eval set weigh.
WeightedScalars = Mapping[str, tuple[jax.Array, jax.Array]]
# An array [B, ...] per name, a row for each example of the batch.
PerExampleOut = Mapping[str, jax.Array]
# A loss and metrics by name, alone or with arrays per example, which --mode=eval writes.
LossOutputs = WeightedScalars | tuple[WeightedScalars, PerExampleOut]


class Task(abc.ABC):
    """The computation of a subclass, written as if for a single device.

    Args:
      model: a `Model`; or called with `rngs`, it returns an NNX module.
      learner: how its parameters are updated.
      weight_sharding: rules for weights whose layers name no mesh axes; None: no rules.
      inputs_split_mapping: how batches are resharded by rank inside every step: `map_1d`,
        `map_2d`, ... to split dims. None: they stay split over the whole mesh.
      fprop_dtype: float32 weights and float32 arrays of a batch, but for its `weights`, are cast to
        it for each pass, for a model without such a setting; stored weights stay float32.
        None: nothing is cast.
      metrics: by name, functions of (outputs, inputs) that are reported in training and evaluation
        in addition to the task's own: `outputs` is what `compute_loss` shares (`share_outputs`),
        `inputs` the batch. Each returns a value for each of `inputs["weights"]`, [B] or [B, T], or
        a pair (values, weights) of arrays of one shape with the rows of the batch, or of scalars.
        Rows of padding count for nothing; but a pair of scalars is taken as it is.

    Raises:
      ConfigError: `fprop_dtype` is not a float, or a metric is no function of two arguments; while
        a step is traced, the model has its own `fprop_dtype`, or a metric returns something else.
    """

    weight_unit = "examples"  # What the weight of "loss" counts; names the metric of speed.
    required_inputs: tuple[str, ...] = ()
    required_decode_inputs: tuple[str, ...] = ()
    # What makes the loss more than a sum over rows, such as "a contrast of all pairs"; for
    # --mode=check, which then holds parts of a batch against the same parts on one device.
    couples_rows: str | None = None
    # Of a task that continues prompts: a Decoder and a Tokenizer. Others have none.
    decoder: Any = None
    tokenizer: Any = None
    # predict(model, *arrays, key), of a task whose model has no call of its own.
    predict: Callable[..., Any] | None = None

    def __init__(
        self,
        model: Model | Callable[..., nnx.Module],
        learner: Learner,
        *,
        weight_sharding: WeightSharding | None = None,
        inputs_split_mapping: InputsSplitMapping = None,
        fprop_dtype: jnp.dtype | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ):
        name = type(self).__name__
        if fprop_dtype is not None and not jnp.issubdtype(fprop_dtype, jnp.floating):
            raise ConfigError(
                f"{name}.fprop_dtype is {jnp.dtype(fprop_dtype).name}; wanted is a float, such as "
                "bfloat16, or None to cast nothing."
            )
        self.fprop_dtype = fprop_dtype
        if not isinstance(learner, Learner):
            raise ConfigError(
                f"{name}.learner is a {type(learner).__name__}; wanted is a Learner: "
                "fdl.Config(Learner, optimizer=..., learning_rate=...)."
            )
        for setting, actual, kind, example in (
            ("weight_sharding", weight_sharding, WeightSharding, "fdl.Config(WeightSharding, ...)"),
            ("inputs_split_mapping", inputs_split_mapping, Mapping, '{"map_2d": ("data", None)}'),
        ):
            expected = f"None, or a {kind.__name__}, such as {example}"
            is_right = actual is None or isinstance(actual, kind)
            require(is_right, f"{name}.{setting}", actual, expected)
        self.model = model if isinstance(model, Model) else NnxModel(model)
        self.learner = learner
        self.weight_sharding = weight_sharding
        self.inputs_split_mapping = inputs_split_mapping
        self.metrics = check_metrics(name, metrics)

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> Any:
        """Returns `Model.module` with its float32 weights in `fprop_dtype`."""
        if self.fprop_dtype is None:
            return self.model.module(mdl_vars, key, eval_key)

        def cast(weight: Any) -> Any:
            if isinstance(weight, ShardedWeight):
                # What is gathered, not the block: gradients are summed in float32.
                return dataclasses.replace(weight, gather=lambda x: self._cast(weight.gather(x)))
            return self._cast(weight)

        is_sharded = lambda x: isinstance(x, ShardedWeight)  # noqa: E731
        params = jax.tree.map(cast, mdl_vars["params"], is_leaf=is_sharded)
        module = self.model.module({**mdl_vars, "params": params}, key, eval_key)
        model = getattr(module, "linen_module", module)
        if hasattr(model, "fprop_dtype"):
            raise ConfigError(
                f"{type(self).__name__}.fprop_dtype is {jnp.dtype(self.fprop_dtype).name}, but "
                f"{type(model).__name__} has an fprop_dtype of its own. Leave the task's out, and "
                "set the model's: task.model.fprop_dtype."
            )
        return module

    def cast_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a batch as a pass gets it: float32 arrays in `fprop_dtype`, but for `weights`."""
        if self.fprop_dtype is None:
            return dict(inputs)
        return {
            name: x if name == "weights" else jax.tree.map(self._cast, x)
            for name, x in inputs.items()
        }

    def _cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.fprop_dtype) if x.dtype == jnp.float32 else x

    @abc.abstractmethod
    def compute_loss(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array | None
    ) -> LossOutputs:
        """Returns metrics, among them "loss": what training minimises, and its weight.

        A pair (metrics, per-example outputs) may be returned as well: `--mode=eval` writes the
        outputs, arrays [B, ...] by name, a line for each row that is not padding. Training
        drops them.

        Args:
          model: the module with its weights: of `Model.module`.
          inputs: a batch without rows of padding.
          key: for dropout and other random draws; None in evaluation.
        """

    def compute_eval_loss(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> LossOutputs:
        """Returns the report of an evaluation of a batch: `compute_loss` without a key.

        Override it where an evaluation draws random numbers, such as a diffusion's time steps.

        Args:
          key: of the run's seed, the step of the weights and the batch, so that evaluating the
            same weights again draws the same numbers. Dropout is off nevertheless.
        """
        return self.compute_loss(model, inputs, None)

    def outputs(
        self,
        method: Callable[..., LossOutputs],
        model: Any,
        inputs: Mapping[str, jax.Array],
        key: jax.Array | None,
    ) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, jax.Array]]:
        """Returns the result of a method above in the form a step needs, as two dicts.

        Args:
          method: `self.compute_loss` or `self.compute_eval_loss`.

        Returns:
          metrics, name -> (value, weight); per-example outputs, name -> [B, ...].

        Raises:
          ConfigError: the method takes other arguments, or returns something else than pairs of
            scalars (value, weight), "loss" among them, and outputs with the batch's rows; or a
            metric of `metrics` does; names what was found.
        """
        name = f"{type(self).__name__}.{callable_name(method).rpartition('.')[2]}"
        check_takes(name, method, "model", "inputs", "key")
        with sharing() as shared:
            result, examples = method(model, inputs, key), {}
        if isinstance(result, tuple) and [isinstance(x, Mapping) for x in result] == [True, True]:
            result, examples = result
        num_rows = num_rows_of(inputs)
        for output, x in examples.items():
            if jnp.shape(x)[:1] != (num_rows,):
                raise ConfigError(
                    f"{name} returns the per-example output {output!r} as {kind_of(x)}; wanted is "
                    f"an array with the {num_rows} rows of the batch first. A mean over rows is a "
                    "metric."
                )
        scalars = checked_scalars(name, result)
        added = values_of(type(self).__name__, self.metrics, shared, inputs, scalars)
        return scalars | added, dict(examples)

    def decode(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns arrays with a row per example; `key` is as in `compute_eval_loss`."""
        raise ConfigError(f"{type(self).__name__} does not decode: it has no method `decode`.")

    def stored_for_decoding(self) -> Mapping[str, Callable[[jax.Array], Any]]:
        """Returns functions by path from a layer's weight to what decoding keeps of it.

        That is an array, or several in a tree, each of the weight's rank and with its sizes or 1.
        The model takes them in its place. {}: every weight is kept as it is, unless overridden.
        """
        return {}

    def decode_to_records(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns a JSON-able record for each example of a decoded batch, without padding rows."""
        raise ConfigError(f"{type(self).__name__} has no method `decode_to_records`.")

    def num_ids(self) -> Mapping[str, int]:
        """Returns how many ids there are for the integers of a batch's leaves, by their names.

        Batches with others are refused, see `check_ids`. {}: nothing is known, unless overridden.
        """
        return {}

    def check_inputs(self, inputs: Mapping[str, Any], required: tuple[str, ...], what: str) -> None:
        """Checks that a batch has the leaves that the task reads.

        Raises:
          ConfigError: a key is missing; names it, what there is, and the dataset.
        """
        for name in required:
            if name not in inputs:
                raise ConfigError(
                    f"{type(self).__name__} reads the key '{name}', but batches of {what} have "
                    f"{sorted(inputs)}.{did_you_mean(name, inputs)} Rename it in the input "
                    "pipeline, or use a pipeline made for this task."
                )


def records_of(outputs: Mapping[str, Any], is_true_row: Any) -> list[dict[str, Any]]:
    """Returns a record for each row that is not padding: its numbers, or lists of them, by name.

    `outputs` are arrays [B, ...] of any number type, `is_true_row` bool [B].
    """
    arrays = {name: _of_numpy(np.asarray(x)) for name, x in outputs.items()}
    rows = np.flatnonzero(np.asarray(is_true_row))
    return [{name: x[row].tolist() for name, x in arrays.items()} for row in rows]


def _of_numpy(x: np.ndarray) -> np.ndarray:
    # NumPy's own kinds print as numbers; bfloat16 and its like, of ml_dtypes, do not.
    return x if x.dtype.kind in "biuf" else x.astype(np.float32)
