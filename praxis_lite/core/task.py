"""Task: a model, its loss, its metrics, its decoding, and how it learns."""

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

# A (value, weight) pair of scalars per name; means over batches and hosts weight by the weight.
WeightedScalars = Mapping[str, tuple[jax.Array, jax.Array]]
# An array [B, ...] per name, with a row per example of the batch.
PerExampleOut = Mapping[str, jax.Array]
# Metrics including "loss", alone or with per-example outputs, which --mode=eval writes.
LossOutputs = WeightedScalars | tuple[WeightedScalars, PerExampleOut]
# Names of a batch's arrays, or their numbers among the arguments of a model's call.
_Name = TypeVar("_Name", str, int)


class Task(abc.ABC):
    """The computation of a job, written as if for a single device. Subclass it.

    Args:
      model: A `Model`, or a function that takes `rngs` and returns an NNX module.
      learner: How the weights are updated.
      weight_sharding: Rules for weights whose layers declare no mesh axes; None: no rules.
      inputs_split_mapping: How batches are resharded by rank inside every step: `map_1d`,
        `map_2d`, ... to split dims. None: rows stay split over the whole mesh.
      fprop_dtype: Dtype that float32 weights and inputs (except `weights`) are cast to for each
        forward pass, for models without such a setting. Stored weights stay float32. None: nothing
        is cast.
      metrics: Additional metrics for training and evaluation: functions of (outputs, inputs) by
        name. `outputs` is what `compute_loss` shares (`share_outputs`), `inputs` the batch. Each
        returns a value for each of `inputs["weights"]`, [B] or [B, T], or a pair (values, weights)
        of arrays of the same shape with a row per example, or of scalars. Padding rows do not
        count, except in a pair of scalars, which is taken as it is.

    Raises:
      ConfigError: `fprop_dtype` is not a float, or a metric is not a function of two arguments. At
        tracing time: the model has its own `fprop_dtype`, or a metric has an invalid result.
    """

    weight_unit = "examples"  # What the weight of "loss" counts; part of the speed metric's name.
    required_inputs: tuple[str, ...] = ()
    required_decode_inputs: tuple[str, ...] = ()
    # Set by tasks whose loss is not a sum over rows, such as "a contrast of all pairs". Then
    # --mode=check compares parts of a batch with the same parts on one device.
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
                "bfloat16, or None to cast nothing."
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
        """Returns the module of `Model.module` with its float32 weights cast to `fprop_dtype`."""
        if self.fprop_dtype is None:
            return self.model.module(mdl_vars, key, eval_key)

        def cast(weight: Any) -> Any:
            if isinstance(weight, ShardedWeight):
                # Cast after gathering: gradients of the blocks are then summed in float32.
                return dataclasses.replace(weight, gather=lambda x: self._cast(weight.gather(x)))
            return self._cast(weight)

        is_sharded = lambda x: isinstance(x, ShardedWeight)  # noqa: E731
        params = jax.tree.map(cast, mdl_vars["params"], is_leaf=is_sharded)
        module = self.model.module({**mdl_vars, "params": params}, key, eval_key)
        model = getattr(module, "linen_module", module)
        if hasattr(model, "fprop_dtype"):
            raise ConfigError(
                f"{type(self).__name__}.fprop_dtype is {jnp.dtype(self.fprop_dtype).name}, but "
                f"{type(model).__name__} has its own fprop_dtype. Omit the task's, and set the "
                "model's: task.model.fprop_dtype."
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
        """Returns metrics, including "loss": the value that training minimises, and its weight.

        It may also return a pair (metrics, per-example outputs). `--mode=eval` writes these
        outputs, arrays [B, ...] by name, as one line per real row; training discards them.

        Args:
          model: The module with its weights (see `Model.module`).
          inputs: A batch without padding rows.
          key: Key for dropout and other random draws; None in evaluation.
        """

    def compute_eval_loss(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> LossOutputs:
        """Returns the metrics of an evaluation batch; by default `compute_loss` without a key.

        Override it if evaluation draws random numbers, such as the time steps of a diffusion model.

        Args:
          model: The module with its weights.
          inputs: A batch without padding rows.
          key: Derived from the run's seed, the step of the weights and the index of the batch, so
            that repeated evaluations of the same weights draw the same numbers. Dropout is off.
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
          inputs: A batch without padding rows.
          key: The key that `method` is called with.

        Returns:
          Metrics, name -> (value, weight), and per-example outputs, name -> [B, ...].

        Raises:
          ConfigError: The method takes other arguments, or does not return (value, weight) pairs
            of scalars including "loss" and outputs with a row per example; or one of the user's
            metrics has an invalid result. The message describes what was found.
        """
        name = f"{type(self).__name__}.{callable_name(method).rpartition('.')[2]}"
        check_takes(name, method, "model", "inputs", "key")
        with collect_shared_outputs() as shared:
            scalars = method(model, inputs, key)
        examples: Mapping[str, jax.Array] = {}
        if isinstance(scalars, tuple) and [isinstance(x, Mapping) for x in scalars] == [True, True]:
            scalars, examples = scalars
        num_rows = num_rows_of(inputs)
        for output, x in examples.items():
            if jnp.shape(x)[:1] != (num_rows,):
                raise ConfigError(
                    f"{name} returns the per-example output {output!r} as {kind_of(x)}; expected "
                    f"an array with the {num_rows} rows of the batch as its first dim. Return "
                    "means over rows as metrics."
                )
        own = checked_scalars(name, scalars)
        added = compute_metrics(type(self).__name__, self.metrics, shared, inputs, own)
        return own | added, dict(examples)

    def decode(
        self, model: Any, inputs: Mapping[str, jax.Array], key: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns arrays with a row per example; `key` is derived as in `compute_eval_loss`."""
        raise ConfigError(f"{type(self).__name__} does not decode: it has no method `decode`.")

    def stored_for_decoding(self) -> Mapping[str, Callable[[jax.Array], Any]]:
        """Returns, by path, functions that convert a layer's weight to its form for decoding.

        A function returns an array, or a tree of arrays, each with the weight's rank and with the
        weight's size or 1 in each dim. The model must accept this form in place of the weight.
        Weights without a function are stored unchanged; by default that is all of them.
        """
        return {}

    def decode_to_records(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns a JSON-serializable record per real example of a decoded batch."""
        raise ConfigError(f"{type(self).__name__} has no method `decode_to_records`.")

    def num_ids(self) -> Mapping[str, int]:
        """Returns the number of valid ids of each integer leaf of a batch, by the leaf's name.

        Batches with other ids are rejected, see `check_ids`. By default nothing is checked.
        """
        return {}

    def check_inputs(self, inputs: Mapping[str, Any], required: tuple[str, ...], what: str) -> None:
        """Checks that a batch has the leaves that the task reads.

        Args:
          inputs: The batch.
          required: Names of the leaves.
          what: The dataset, for the message.

        Raises:
          ConfigError: A leaf is missing. The message lists the leaves of the batch.
        """
        for name in required:
            if name not in inputs:
                raise ConfigError(
                    f"{type(self).__name__} reads the key '{name}', but batches of {what} have the "
                    f"keys {sorted(inputs)}.{did_you_mean(name, inputs)} Rename the key in the "
                    "input pipeline, or use a pipeline made for this task."
                )


def records_of(outputs: Mapping[str, Any], is_true_row: Any) -> list[dict[str, Any]]:
    """Returns a record per real row: its numbers, or lists of numbers, by name.

    Args:
      outputs: Arrays [B, ...] of any number type.
      is_true_row: Bool [B]: False for padding rows.
    """
    arrays = {name: _as_numpy_type(np.asarray(x)) for name, x in outputs.items()}
    rows = np.flatnonzero(np.asarray(is_true_row))
    return [{name: x[row].tolist() for name, x in arrays.items()} for row in rows]


def _as_numpy_type(x: np.ndarray) -> np.ndarray:
    # The floats of ml_dtypes, such as bfloat16, do not become Python numbers.
    return x if x.dtype.kind in "biuf" else x.astype(np.float32)
