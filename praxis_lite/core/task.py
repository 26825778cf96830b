"""Task: a model with its loss, metrics, decoding and learner."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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
    collect_shared_outputs,
    compute_metrics,
    kind_of,
)
from praxis_lite.core.models.model import MdlVars, Model, ShardedWeight
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.sharding.batch_sharding import InputsSplitMapping, num_rows_of
from praxis_lite.core.sharding.weight_sharding import WeightSharding

# A (value, weight) pair of scalars per name. Means over batches and hosts are weighted.
WeightedScalars = Mapping[str, tuple[jax.Array, jax.Array]]
# An array [B, ...] per name, with one row per example.
PerExampleOut = Mapping[str, jax.Array]
# Metrics including "loss", optionally with per-example outputs, which `praxis eval` writes.
LossOutputs = WeightedScalars | tuple[WeightedScalars, PerExampleOut]
# Names of arrays in a batch, or their positions among a model's arguments.
_Name = TypeVar("_Name", str, int)


class Task(abc.ABC):
    """Base class for tasks, which define a job's computation as if for a single device.

    Args:
      model: A `Model`, or a function that takes `rngs` and returns an NNX module.
      learner: The Learner that updates the weights.
      weight_sharding: Rules for weights whose layers declare no mesh axes, or None.
      inputs_split_mapping: Maps the rank of an input (`map_1d`, `map_2d`, ...) to the split dims
        that it is resharded to in every step. If None, rows stay split over all mesh axes.
      fprop_dtype: Dtype that float32 weights and inputs (except `weights`) are cast to in each
        forward pass, for models without such a setting. Stored weights stay float32. If None,
        nothing is cast.
      metrics: Additional metrics for training and evaluation. Maps names to functions of (outputs,
        inputs), where `outputs` are the arrays that `compute_loss` passes to `share_outputs`, and
        `inputs` is the batch. A function returns a value for each element of `inputs["weights"]`,
        [B] or [B, T]; or a pair (values, weights) of arrays of equal shape with a row per example;
        or a pair of scalars. Padding rows are ignored, except that pairs of scalars are used
        unchanged.

    Raises:
      ConfigError: `fprop_dtype` is not a float, or a metric is not a function of two arguments.
        While tracing: the model also has an `fprop_dtype` setting, or a metric has an invalid
        result.
    """

    weight_unit = "examples"  # Unit of the weight of "loss"; part of the speed metric's name.
    required_inputs: tuple[str, ...] = ()
    required_decode_inputs: tuple[str, ...] = ()
    # The reason why the loss is not a sum over rows, such as "a contrast of all pairs", or None.
    # If it is set, `praxis check` compares parts of a batch with the same parts on one device.
    couples_rows: str | None = None
    # A Decoder and a Tokenizer, for tasks that continue prompts.
    decoder: Any = None
    tokenizer: Any = None
    # predict(model, *arrays, key), for tasks whose model has no `__call__`.
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
                f"{name}.fprop_dtype is {jnp.dtype(fprop_dtype).name}; expected a float, such as "
                "bfloat16, or None to disable casting."
            )
        self.fprop_dtype = fprop_dtype
        if not isinstance(learner, Learner):
            raise ConfigError(
                f"{name}.learner is a {type(learner).__name__}; expected a Learner: "
                "fdl.Config(Learner, optimizer=..., learning_rate=...)."
            )
        for setting, actual, kind, example in (
            ("weight_sharding", weight_sharding, WeightSharding, "fdl.Config(WeightSharding, ...)"),
            ("inputs_split_mapping", inputs_split_mapping, Mapping, '{"map_2d": ("data", None)}'),
        ):
            expected = f"None, or a {kind.__name__}, such as {example}"
            is_valid = actual is None or isinstance(actual, kind)
            require(is_valid, f"{name}.{setting}", actual, expected)
        self.model = model if isinstance(model, Model) else NnxModel(model)
        self.learner = learner
        self.weight_sharding = weight_sharding
        self.inputs_split_mapping = inputs_split_mapping
        self.metrics = check_metrics(name, metrics)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, {self.learner!r})"

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> Any:
        """Calls `Model.module` with float32 weights cast to `fprop_dtype`."""
        if self.fprop_dtype is None:
            return self.model.module(mdl_vars, key, eval_key)

        def cast(weight: Any) -> Any:
            if isinstance(weight, ShardedWeight):
                # Cast after gathering, so that gradients of the blocks are summed in float32.
                return dataclasses.replace(weight, gather=lambda x: self._cast(weight.gather(x)))
            return self._cast(weight)

        is_sharded = lambda x: isinstance(x, ShardedWeight)  # noqa: E731
        params = jax.tree.map(cast, mdl_vars["params"], is_leaf=is_sharded)
        module = self.model.module({**mdl_vars, "params": params}, key, eval_key)
        model = getattr(module, "linen_module", module)
        if hasattr(model, "fprop_dtype"):
            raise ConfigError(
                f"{type(self).__name__}.fprop_dtype is {jnp.dtype(self.fprop_dtype).name}, but "
                f"{type(model).__name__} also has a setting fprop_dtype. Set "
                "task.model.fprop_dtype instead of task.fprop_dtype."
            )
        return module

    def cast_inputs(self, inputs: Mapping[_Name, Any]) -> dict[_Name, Any]:
        """Returns a batch with float32 arrays cast to `fprop_dtype`, except `weights`."""
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
        """Returns metrics as (value, weight) pairs; training minimizes the metric "loss".

        The result may also be a pair (metrics, per-example outputs), where the outputs are arrays
        [B, ...], keyed by name. `praxis eval` writes them as one line per real row; training
        discards these outputs.

        Args:
          model: The module with its weights (see `Model.module`).
          inputs: A batch without the rows that the Partitioner adds. Rows with which a pipeline
            fills its last batch remain; their `weights` are 0.
          key: Key for dropout and other random draws, or None in evaluation.
        """

    def compute_eval_loss(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> LossOutputs:
        """Returns the metrics for an evaluation batch; by default, `compute_loss` without a key.

        Override this method if evaluation draws random numbers, such as the time steps of a
        diffusion model.

        Args:
          model: The module with its weights, with dropout disabled.
          inputs: A batch, as in `compute_loss`.
          key: Key derived from the run's seed, the step of the weights and the index of the batch,
            so that repeated evaluations of the same weights draw the same random numbers.
        """
        return self.compute_loss(model, inputs, None)

    def outputs(
        self,
        method: Callable[..., LossOutputs],
        model: Any,
        inputs: Mapping[str, jax.Array],
        key: jax.Array | None,
    ) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, jax.Array]]:
        """Calls `method` and returns its metrics and per-example outputs as two dicts.

        Args:
          method: `self.compute_loss` or `self.compute_eval_loss`.
          model: The module with its weights.
          inputs: A batch, as in `compute_loss`.
          key: Key to call `method` with.

        Returns:
          Metrics, name -> (value, weight), and per-example outputs, name -> [B, ...].

        Raises:
          ConfigError: The method takes different arguments, its metrics are not (value, weight)
            pairs of scalars including "loss", its outputs do not have a row per example, or one of
            the additional metrics has an invalid result. The message describes what was found.
        """
        name = f"{type(self).__name__}.{callable_name(method).rpartition('.')[2]}"
        check_takes(name, method, "model", "inputs", "key")
        with collect_shared_outputs() as shared:
            scalars = method(model, inputs, key)
        # The method returns metrics, or a pair of metrics and per-example outputs.
        examples: Mapping[str, jax.Array] = {}
        if isinstance(scalars, tuple) and [isinstance(x, Mapping) for x in scalars] == [True, True]:
            scalars, examples = scalars
        num_rows = num_rows_of(inputs)
        for output, x in examples.items():
            if jnp.shape(x)[:1] != (num_rows,):
                raise ConfigError(
                    f"{name} returns the per-example output {output!r} as {kind_of(x)}; expected "
                    f"an array whose first dim has size {num_rows}, the number of rows in the "
                    "batch. Return means over rows as metrics."
                )
        own = checked_scalars(name, scalars)
        added = compute_metrics(type(self).__name__, self.metrics, shared, inputs, own)
        return own | added, dict(examples)

    def decode(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns arrays with a row per example; for `key`, see `compute_eval_loss`."""
        raise ConfigError(f"{type(self).__name__} cannot decode. Implement its `decode` method.")

    def stored_for_decoding(self) -> Mapping[str, Callable[[jax.Array], Any]]:
        """Maps paths of weights to functions that convert a layer's weight for decoding.

        A function returns an array or a tree of arrays. Each array has the rank of the weight, and
        each dim has either the size of the weight's dim or size 1. The model must accept the result
        in place of the weight. Weights without a function are not converted. By default, no weights
        are converted.
        """
        return {}

    def decode_to_records(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns a JSON-serializable record for each real example in a decoded batch."""
        raise ConfigError(
            f"{type(self).__name__} cannot write decoded outputs. Implement `decode_to_records`."
        )

    def num_ids(self) -> Mapping[str, int]:
        """Maps the name of each integer leaf in a batch to its number of valid ids.

        Batches that contain invalid ids are rejected; see `check_ids`. By default, ids are not
        checked.
        """
        return {}

    def check_inputs(self, inputs: Mapping[str, Any], required: tuple[str, ...], what: str) -> None:
        """Checks that a batch contains the leaves that the task reads.

        Args:
          inputs: The batch.
          required: Names of the leaves.
          what: Name of the dataset, for messages.

        Raises:
          ConfigError: A leaf is missing. The message lists the leaves in the batch.
        """
        for name in required:
            if name not in inputs:
                raise ConfigError(
                    f"{type(self).__name__} reads the key '{name}', but batches of {what} have the "
                    f"keys {sorted(inputs)}.{did_you_mean(name, inputs)} Rename the key in the "
                    "input pipeline, or use an input pipeline for this task."
                )


def records_of(outputs: Mapping[str, Any], is_true_row: Any) -> list[dict[str, Any]]:
    """Returns a JSON-serializable dict per example, with numbers or nested lists of numbers.

    Args:
      outputs: Numeric arrays [B, ...], keyed by name.
      is_true_row: Bool array [B] that is False for padding rows.
    """
    arrays = {name: _as_numpy_type(np.asarray(x)) for name, x in outputs.items()}
    rows = np.flatnonzero(np.asarray(is_true_row))
    return [{name: x[row].tolist() for name, x in arrays.items()} for row in rows]


def _as_numpy_type(x: np.ndarray) -> np.ndarray:
    # Cast the floats of ml_dtypes, such as bfloat16, because `tolist` does not convert them.
    return x if x.dtype.kind in "biuf" else x.astype(np.float32)
