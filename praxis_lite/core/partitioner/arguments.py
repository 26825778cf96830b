"""Checks the arguments of a Partitioner's calls; errors name the wrong one and what to give.

Shapes and dtypes are checked while a step is traced, once per program. Other checks run only after
JAX has refused a call, so that they cost a correct call nothing. The exception is a deleted array,
which is checked in each call: with several devices XLA would end the process.
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
    """Returns `compiled(*args)`; a wrong argument is named, instead of an error of JAX.

    Args:
      compiled: a step, as `jax.jit` returns it.
      check: called with its arguments; raises a ConfigError if one is wrong.
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
        # A program that failed as it ran has taken its state: that is not what was wrong.
        if "deleted" in str(error):
            check(*args)
        raise


def check_tree(layout: "StateLayout", tree: PyTree, name: str, mesh: Mesh | None = None) -> None:
    """Checks that a tree is as a layout describes it.

    Args:
      layout: of a TrainState or of its mdl_vars.
      tree: of arrays or tracers, of padded shapes.
      name: of the argument, "train_step: state".
      mesh: expected of the arrays; None: not checked.

    Raises:
      ConfigError: it is of another type, lacks a leaf, has one too many, or one of another shape or
        dtype, on other devices, or deleted; says what to give.
    """
    check_type(layout, tree, name)
    expected = {leaf.path: leaf for leaf in layout.leaves()}
    actual = dict(leaves_with_path(tree, is_leaf=lambda x: x is None))
    missing, unknown = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected)
    if missing or unknown:
        lacks = f" lacks {few(missing)}" if missing else ""
        has = f"{' and' if missing else ''} has {few(unknown)}, which the model does not have."
        near = did_you_mean(unknown[0], expected) if unknown else ""
        instead = "the tree of this Partitioner's own init or steps, with all its leaves"
        if "params" not in tree and f"params/{next(iter(actual), '')}" in expected:
            instead, near = "state.mdl_vars, of which these are the params", ""
        raise ConfigError(f"{name}{lacks}{has if unknown else '.'}{near} Give {instead}.")
    for path, leaf in expected.items():
        _check_leaf(leaf, actual[path], f"{name}/{path}", mesh)


def check_type(layout: "StateLayout", tree: PyTree, name: str) -> None:
    """Checks that a tree is a TrainState, or a dict, as a layout is; raises as `check_tree`."""
    if type(tree) is not type(layout.shapes):
        raise ConfigError(f"{name} is {_described(tree)}; {_wanted(layout.shapes, tree)}")


def check_batch(batch: Any, name: str, mesh: Mesh) -> None:
    """Checks that a batch is a GlobalBatch; raises as `check_tree`."""
    if not isinstance(batch, GlobalBatch):
        raise ConfigError(
            f"{name} is {_described(batch)}; wanted is a GlobalBatch. Give "
            "partitioner.global_batch(batch), of a dict of NumPy arrays."
        )
    for path, x in leaves_with_path(batch.inputs):
        _check_devices(x, f"{name}: {path}", mesh, "partitioner.global_batch(batch)")


def check_rows(inputs: Any, call: str, sizes: Mapping[str, int]) -> None:
    """Checks that a batch's rows are arrays, and their ids some that the model has.

    Args:
      call: the call's name, for the message.
      sizes: as `Task.num_ids`.

    Raises:
      ConfigError: it is a GlobalBatch already, has no leaves, or a leaf is no array of numbers;
        see `check_ids`.
    """
    check_spec(inputs, call)
    for path, x in leaves_with_path(inputs):
        require(
            x.dtype.kind not in "USOMm", f"{call}: the dtype of {path}", str(x.dtype), "numbers",
            "A tokenizer makes ids of a text.",
        )
    if isinstance(inputs, Mapping):
        check_ids(inputs, sizes, call)


def check_spec(spec: Any, call: str) -> None:
    """Checks that a batch's leaves have shapes and dtypes; raises as `check_rows`."""
    if isinstance(spec, GlobalBatch):
        raise ConfigError(
            f"{call} was given a GlobalBatch; wanted are its rows before global_batch, NumPy "
            "arrays or ShapeDtypeStructs."
        )
    leaves = leaves_with_path(spec, is_leaf=lambda x: x is None or _is_of_numbers(x))
    if not leaves:
        raise ConfigError(f"{call} was given {_described(spec)}; wanted is a dict of arrays.")
    for path, x in leaves:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ConfigError(
                f"{call}: {path or 'the batch'} is {_described(x)}; wanted is a NumPy array: "
                "np.asarray(...) of it."
            )


def check_key(key: Any, name: str, may_be_none: bool = False) -> None:
    """Checks that a key is a key of `jax.random`; raises as `check_tree`."""
    dtype = getattr(key, "dtype", None)
    is_raw = dtype == jnp.uint32 and key.shape[-1:] and key.ndim == 1
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.ndim == 0
    if not (is_raw or is_key or (may_be_none and key is None)):
        raise ConfigError(
            f"{name} is {_described(key)}; wanted is a key of jax.random. Give "
            "partitioner.key(seed), or batch_key(seed, step, batch)."
        )


def _check_leaf(leaf: Any, actual: Any, name: str, mesh: Mesh | None) -> None:
    expected = f"{leaf.dtype.name} {leaf.padded_shape}"
    if not hasattr(actual, "shape") or not hasattr(actual, "dtype"):
        raise ConfigError(f"{name} is {_described(actual)}; wanted is an array, {expected}.")
    if _is_deleted(actual):
        raise ConfigError(
            f"{name} is deleted: a train step donates the state that it is given. Continue "
            "with the state that it returned, or copy what you keep beforehand: "
            "jax.tree.map(jnp.copy, state)."
        )
    if actual.shape != leaf.padded_shape:
        is_logical = actual.shape == leaf.shape
        hint = (
            "That is its shape without padding: give layout.pad(...) of it, in jax.jit, or what "
            "this Partitioner's init and steps return." if is_logical else
            "It is of another model, or of a Partitioner with another mesh."
        )
        raise ConfigError(
            f"{name} has the shape {tuple(actual.shape)}; wanted is {expected}"
            f"{', padded' if leaf.shape != leaf.padded_shape else ''}. {hint}"
        )
    require(
        actual.dtype == leaf.dtype, f"The dtype of {name}", str(actual.dtype), leaf.dtype.name,
        "Weights keep the dtype of init; what they are computed in is the model's fprop_dtype.",
    )
    if mesh is not None:
        _check_devices(actual, name, mesh, "what this Partitioner's own init or steps return")


def _check_devices(x: Any, name: str, mesh: Mesh, instead: str) -> None:
    # JAX moves an array that is not committed to its device.
    if not isinstance(x, jax.Array) or is_traced(x) or not x.committed:
        return
    devices, local = x.sharding.device_set, set(mesh.devices.flat)
    if devices != local:
        raise ConfigError(
            f"{name} is on {len(devices)} devices that are not the {len(local)} of this "
            f"Partitioner's mesh {dict(mesh.shape)}. Give {instead}."
        )
    if isinstance(x.sharding, NamedSharding) and dict(x.sharding.mesh.shape) != dict(mesh.shape):
        raise ConfigError(
            f"{name} is on the mesh {dict(x.sharding.mesh.shape)}; this Partitioner's is "
            f"{dict(mesh.shape)}. Give {instead}."
        )


def _wanted(expected: Any, actual: Any) -> str:
    if not isinstance(expected, Mapping):
        return "wanted is a TrainState: what init or the step before returned."
    if hasattr(actual, "mdl_vars"):
        return "wanted are the mdl_vars of a state: give state.mdl_vars."
    return "wanted is a dict of params and non_trainable: give state.mdl_vars."


def _is_of_numbers(x: Any) -> bool:
    # A list of arrays is a tree; a list of Python numbers was meant as an array.
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
    """Returns True if the first leaf is a deleted array; of a state that is its step."""
    leaf = tree.step if hasattr(tree, "step") else next(iter(jax.tree.leaves(tree)), None)
    is_array = isinstance(leaf, jax.Array) and not is_traced(leaf)
    return is_array and leaf.is_deleted()
