"""Checks the arguments of a Partitioner's calls; errors name the wrong one and its replacement.

Shapes and dtypes are checked while a step is traced, once per program. Other checks run only after
JAX has rejected a call, so that they cost valid calls nothing. Only deleted arrays are checked in
each call, because with several devices XLA would crash the process.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.errors import ConfigError, did_you_mean, few, require
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, check_ids
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.padding import is_traced

if TYPE_CHECKING:
    from praxis_lite.core.partitioner.train_state import StateLayout

PyTree = Any


def checked_call(compiled: Callable[..., Any], check: Callable[..., None], *args: Any) -> Any:
    """Returns `compiled(*args)`; if JAX raises an error, `check` may replace it by a ConfigError.

    Args:
      compiled: A step, as returned by `jax.jit`.
      check: Called with the arguments; raises ConfigError if one of them is invalid.
      args: Arguments of the step; the first is its state or weights.
    """
    if _is_deleted(args[0]):
        check(*args)
    try:
        return compiled(*args)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError):
        check(*args)
        raise
    except RuntimeError as error:
        # If a program fails while it runs, its donated state is deleted, but that is not the cause.
        if "deleted" in str(error):
            check(*args)
        raise


def check_tree(layout: "StateLayout", tree: PyTree, name: str, mesh: Mesh | None = None) -> None:
    """Checks that a tree has the structure, shapes and dtypes of a layout.

    Args:
      layout: Layout of a TrainState or of its mdl_vars.
      tree: Arrays or tracers of padded shapes.
      name: Name of the argument, such as "train_step: state".
      mesh: Expected mesh of the arrays; None: not checked.

    Raises:
      ConfigError: The tree has another type, lacks or has additional leaves, or has a leaf of
        another shape or dtype, on other devices, or deleted. The message says what to pass.
    """
    check_type(layout, tree, name)
    expected = {leaf.path: leaf for leaf in layout.leaves()}
    actual = dict(leaves_with_path(tree, is_leaf=lambda x: x is None))
    missing, unknown = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected)
    if missing or unknown:
        lacks = f" lacks {few(missing)}" if missing else ""
        has = f"{' and' if missing else ''} has {few(unknown)}, which are not in the model."
        near = did_you_mean(unknown[0], expected) if unknown else ""
        instead = "the complete tree that this Partitioner's init or steps return"
        if "params" not in tree and f"params/{next(iter(actual), '')}" in expected:
            instead, near = "state.mdl_vars, of which these are the params", ""
        raise ConfigError(f"{name}{lacks}{has if unknown else '.'}{near} Pass {instead}.")
    for path, leaf in expected.items():
        _check_leaf(leaf, actual[path], f"{name}/{path}", mesh)


def check_type(layout: "StateLayout", tree: PyTree, name: str) -> None:
    """Checks that a tree is a TrainState or a dict, like the layout; raises as `check_tree`."""
    if type(tree) is not type(layout.shapes):
        raise ConfigError(f"{name} is {_described(tree)}; {_expected(layout.shapes, tree)}")


def check_batch(batch: Any, name: str, mesh: Mesh) -> None:
    """Checks that a batch is a GlobalBatch; raises as `check_tree`."""
    if not isinstance(batch, GlobalBatch):
        raise ConfigError(
            f"{name} is {_described(batch)}; expected a GlobalBatch. Pass "
            "partitioner.global_batch(batch) for a dict of NumPy arrays."
        )
    for path, x in leaves_with_path(batch.inputs):
        _check_devices(x, f"{name}: {path}", mesh, "partitioner.global_batch(batch)")


def check_rows(inputs: Any, call: str, sizes: Mapping[str, int]) -> None:
    """Checks that a batch has arrays of numbers, and that ids are in the model's range.

    Args:
      inputs: The batch.
      call: Name of the call, for messages.
      sizes: Number of valid ids by leaf, as from `Task.num_ids`.

    Raises:
      ConfigError: The batch is already a GlobalBatch, has no leaves, or has a leaf that is not an
        array of numbers; see also `check_ids`.
    """
    check_spec(inputs, call)
    for path, x in leaves_with_path(inputs):
        require(
            x.dtype.kind not in "USOMm", f"{call}: the dtype of {path}", str(x.dtype), "numbers",
            "Use a tokenizer to convert texts to ids.",
        )
    if isinstance(inputs, Mapping):
        check_ids(inputs, sizes, call)


def check_spec(spec: Any, call: str) -> None:
    """Checks that a batch's leaves have shapes and dtypes; raises as `check_rows` does."""
    if isinstance(spec, GlobalBatch):
        raise ConfigError(
            f"{call} was given a GlobalBatch; expected its rows before global_batch: NumPy arrays "
            "or ShapeDtypeStructs."
        )
    leaves = leaves_with_path(spec, is_leaf=lambda x: x is None or _is_list_of_numbers(x))
    if not leaves:
        raise ConfigError(f"{call} was given {_described(spec)}; expected a dict of arrays.")
    for path, x in leaves:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ConfigError(
                f"{call}: {path or 'the batch'} is {_described(x)}; expected a NumPy array. "
                "Convert it with np.asarray."
            )


def check_key(key: Any, name: str, may_be_none: bool = False) -> None:
    """Checks that a key is a `jax.random` key; raises as `check_tree` does."""
    dtype = getattr(key, "dtype", None)
    is_raw = dtype == jnp.uint32 and key.shape[-1:] and key.ndim == 1
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.ndim == 0
    if not (is_raw or is_key or (may_be_none and key is None)):
        raise ConfigError(
            f"{name} is {_described(key)}; expected a key of jax.random. Pass "
            "partitioner.key(seed) or batch_key(seed, step, batch)."
        )


def _check_leaf(leaf: Any, actual: Any, name: str, mesh: Mesh | None) -> None:
    expected = f"{leaf.dtype.name} {leaf.padded_shape}"
    if not hasattr(actual, "shape") or not hasattr(actual, "dtype"):
        raise ConfigError(f"{name} is {_described(actual)}; expected an array, {expected}.")
    if _is_deleted(actual):
        raise ConfigError(
            f"{name} is deleted: a train step donates the state that it receives. Continue "
            "with the state that it returned, or copy the state before the step: "
            "jax.tree.map(jnp.copy, state)."
        )
    if actual.shape != leaf.padded_shape:
        is_logical = actual.shape == leaf.shape
        hint = (
            "That is its shape without padding: pass the result of layout.pad(...) in jax.jit, or "
            "what this Partitioner's init and steps return." if is_logical else
            "It belongs to another model, or to a Partitioner with another mesh."
        )
        raise ConfigError(
            f"{name} has the shape {tuple(actual.shape)}; expected {expected}"
            f"{', padded' if leaf.shape != leaf.padded_shape else ''}. {hint}"
        )
    require(
        actual.dtype == leaf.dtype, f"The dtype of {name}", str(actual.dtype), leaf.dtype.name,
        "Weights keep the dtype of init; set the model's fprop_dtype to compute in another.",
    )
    if mesh is not None:
        _check_devices(actual, name, mesh, "what this Partitioner's init or steps return")


def _check_devices(x: Any, name: str, mesh: Mesh, instead: str) -> None:
    # JAX moves uncommitted arrays to the devices of the computation.
    if not isinstance(x, jax.Array) or is_traced(x) or not x.committed:
        return
    devices, local = x.sharding.device_set, set(mesh.devices.flat)
    if devices != local:
        raise ConfigError(
            f"{name} is on {len(devices)} devices that are not the {len(local)} of this "
            f"Partitioner's mesh {dict(mesh.shape)}. Pass {instead}."
        )
    if isinstance(x.sharding, NamedSharding) and dict(x.sharding.mesh.shape) != dict(mesh.shape):
        raise ConfigError(
            f"{name} is on the mesh {dict(x.sharding.mesh.shape)}; this Partitioner's is "
            f"{dict(mesh.shape)}. Pass {instead}."
        )


def _expected(expected: Any, actual: Any) -> str:
    if not isinstance(expected, Mapping):
        return "expected a TrainState: pass the result of init or of the previous step."
    if hasattr(actual, "mdl_vars"):
        return "expected the mdl_vars of a state: pass state.mdl_vars."
    return "expected a dict of params and non_trainable: pass state.mdl_vars."


def _is_list_of_numbers(x: Any) -> bool:
    # A list of arrays is a tree, but a list of Python numbers was meant as an array.
    return isinstance(x, list) and not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {few([str(name) for name in value])}" if value else "an empty dict"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array, {value.dtype} {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


def _is_deleted(tree: Any) -> bool:
    """Returns whether the first leaf, or the step of a TrainState, is a deleted array."""
    leaf = tree.step if hasattr(tree, "step") else next(iter(jax.tree.leaves(tree)), None)
    return isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted()
