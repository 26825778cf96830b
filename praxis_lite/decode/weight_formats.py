"""Storage formats for weights during decoding: a narrower dtype, int8, or transposed."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.jaxprs import evaluate_jaxpr, split_loop_operands
from praxis_lite.core.models.model import abstract_mdl_vars
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.partitioner.steps import decode_step
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.task import Task
from praxis_lite.layers.base.dense import Dense, is_dense
from praxis_lite.layers.whole_model.decoding_weight_formats import (
    Int8Weight,
    TransposedWeight,
    to_int8,
    to_transposed,
)
from praxis_lite.layers.whole_model.quantization import is_matrix, log_rounding

Stored = Callable[[jax.Array], Any]
# Inputs of tasks for decoding, with a single row.
_ROW = {
    "ids": jax.ShapeDtypeStruct((1, 1), jnp.int32),
    "prefix_lengths": jax.ShapeDtypeStruct((1,), jnp.int32),
    "weights": jax.ShapeDtypeStruct((1,), jnp.float32),
    "src_ids": jax.ShapeDtypeStruct((1, 1), jnp.int32),
    "src_paddings": jax.ShapeDtypeStruct((1, 1), jnp.float32),
}
# Operations whose results contain only elements of the first operand.
_VIEWS = frozenset(
    (
        "broadcast_in_dim",
        "copy",
        "dynamic_slice",
        "expand_dims",
        "gather",
        "optimization_barrier",
        "reshape",
        "sharding_constraint",
        "slice",
        "squeeze",
        "transpose",
    )
)


@dataclasses.dataclass(frozen=True)
class Cast:
    """Stores a weight in a different dtype."""

    dtype: Any

    def __call__(self, weight: jax.Array) -> jax.Array:
        return weight.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Round:
    """Stores a weight as int8, with a scale per output channel.

    Attributes:
      contracted_dims: Dims that the matmul contracts, as negative indices, so that they are the
        same with and without stacked dims.
    """

    contracted_dims: tuple[int, ...]

    def __call__(self, weight: jax.Array) -> Int8Weight:
        return to_int8(weight, self.contracted_dims)


@dataclasses.dataclass(frozen=True)
class Transpose:
    """Stores a weight with its output dims first, optionally in a different dtype."""

    contracted_dims: tuple[int, ...]
    cast: Cast | None

    def __call__(self, weight: jax.Array) -> TransposedWeight:
        return to_transposed(self.cast(weight) if self.cast else weight, self.contracted_dims)


def stored_forms(task: Task) -> dict[str, Stored]:
    """Returns the functions that convert weights for decoding, keyed by the weight's path.

    If `weights_dtype` is "activations", a weight that is only used after a cast to one narrower
    dtype is stored in that dtype, which does not change the results. If `weights_dtype` is "int8",
    weights of dense layers are additionally rounded to int8, with a scale per output channel. If
    `weights_outputs_first` is set, weights of dense layers that are not rounded are transposed.

    Args:
      task: A task that decodes rows of tokens. The settings of the task's Decoder select the
        formats.

    Raises:
      ConfigError: A setting applies to dense layers, but the model has no dense layers; or the task
        decodes inputs that cannot be traced here.
    """
    decoder = task.decoder
    casts = {} if decoder.weights_dtype is None else _casts(task)
    forms: dict[str, Stored] = {**casts}
    if decoder.weights_outputs_first:
        layers = _dense_layers(task, "weights_outputs_first", True)
        forms |= {
            path: Transpose(dims, casts.get(path))
            for path, (layer, dims) in layers.items()
            if TransposedWeight.supports(layer.equation)
        }
    if decoder.weights_dtype == "int8":
        layers = _dense_layers(task, "weights_dtype", "int8")
        forms |= {path: Round(dims) for path, (_, dims) in layers.items()}
        paths = [path.removeprefix("params/") for path in layers]
        unrounded = [path for path, node in _nodes(task) if is_matrix(node) and path not in paths]
        log_rounding((("int8", tuple(paths)),), tuple(unrounded))
    return forms


def _casts(task: Task) -> dict[str, Cast]:
    for name in task.required_decode_inputs:
        if name not in _ROW:
            raise ConfigError(
                f"{type(task.decoder).__name__}.weights_dtype {task.decoder.weights_dtype!r} "
                f"supports only the inputs {', '.join(_ROW)}, but {type(task).__name__} also "
                f"decodes {name!r}. Omit weights_dtype, or override the task's "
                "stored_for_decoding."
            )
    # Trace a decoding step to find out how it uses each weight.
    inputs = {name: _ROW[name] for name in task.required_decode_inputs}
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = abstract_mdl_vars(task.model.weight_specs())
    traced = jax.make_jaxpr(functools.partial(decode_step, task))(shapes, inputs, key)
    dtypes = {path: leaf.dtype for path, leaf in leaves_with_path(shapes)}
    uses: dict[str, set[Any]] = defaultdict(set)
    rest = len(traced.jaxpr.invars) - len(dtypes)
    _follow(traced, [*dtypes, *[None] * rest], uses)
    # A weight can be stored in a narrower dtype if every use first casts it to that dtype.
    return {
        path: Cast(used)
        for path, dtype in dtypes.items()
        if len(uses[path]) == 1
        for used in uses[path]
        if used is not None and _narrows(dtype, used)
    }


def _narrows(old: Any, new: Any) -> bool:
    are_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return are_floats and np.dtype(new).itemsize < np.dtype(old).itemsize


def _follow(jaxpr: Any, values: list[str | None], uses: dict[str, set[Any]]) -> list[str | None]:
    """Records how a jaxpr uses weights.

    Each weight is followed through operations that only select or move its elements. Weights in the
    carry of a loop count as used without a cast, because the carry may change.

    Args:
      jaxpr: The jaxpr.
      values: For each argument, the path of the weight that it contains, or None.
      uses: For each path, the set of dtypes to which the weight is cast, including None if the
        weight is used without a cast. Updated in place.

    Returns:
      For each result, the path of the weight whose elements it contains, or None.
    """

    def rule(eqn: core.JaxprEqn, values: list[str | None]) -> list[str | None]:
        name, inner = eqn.primitive.name, list(core.jaxprs_in_params(eqn.params))
        nothing: list[str | None] = [None] * len(eqn.outvars)
        if not any(values):
            return nothing
        if name == "convert_element_type" and values[0] is not None:
            uses[values[0]].add(np.dtype(eqn.params["new_dtype"]))
            return nothing
        if name in _VIEWS and not any(values[1:]):
            return values[:1]
        if name == "optimization_barrier":
            return values
        if name == "while":
            # Only the constants of a loop are the same weight in each iteration.
            cond_consts, body_consts, carry = split_loop_operands(eqn, values)
            add_other_use(carry)
            unknown = [None] * len(carry)
            _follow(eqn.params["cond_jaxpr"], [*cond_consts, *unknown], uses)
            add_other_use(_follow(eqn.params["body_jaxpr"], [*body_consts, *unknown], uses))
            return nothing
        if name == "scan":
            consts, carry, xs = split_loop_operands(eqn, values)
            add_other_use(carry)
            inner_values = [*consts, *[None] * len(carry), *xs]
            add_other_use(_follow(eqn.params["jaxpr"], inner_values, uses))
            return nothing
        if name == "cond":
            # The first operand is the index of the branch.
            for branch in eqn.params["branches"]:
                add_other_use(_follow(branch, values[1:], uses))
            return nothing
        # A call, such as a jit or a remat. A Pallas kernel receives references instead of values.
        if len(inner) == 1 and len(inner[0].invars) == len(values) and name != "pallas_call":
            return _follow(inner[0], values, uses)
        add_other_use(values)
        return nothing

    def add_other_use(values: Sequence[str | None]) -> None:
        for path in filter(None, values):
            uses[path].add(None)

    return evaluate_jaxpr(jaxpr, values, rule)


def _nodes(task: Task) -> list[tuple[str, Any]]:
    """Returns (path, node) for the layers and weights of an NNX model, and [] for other models."""
    if not isinstance(task.model, NnxModel):
        return []
    graph = nnx.compat.iter_graph(task.model.abstract_module())
    return [("/".join(map(str, path)), node) for path, node in graph]


def _dense_layers(task: Task, setting: str, value: Any) -> dict[str, tuple[Dense, tuple[int, ...]]]:
    """Returns (dense layer, dims contracted by the layer's matmul), keyed by weight path."""
    dense_layers = {
        f"params/{path}/w".replace("//", "/"): (node, dims)
        for path, node in _nodes(task)
        if is_dense(node) and (dims := node.contracted_dims)
    }
    if not dense_layers:
        raise ConfigError(
            f"{type(task.decoder).__name__}.{setting} is {value!r}, but the model contains no "
            f"dense layers of praxis_lite. Omit {setting}."
        )
    return dense_layers
