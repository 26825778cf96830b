"""Checks the arguments of calls to a Partitioner, and explains which argument is invalid.

Shapes and dtypes are checked while a step is being traced, once per shape. Other checks run only
after JAX has rejected a call, so that valid calls stay fast. Deleted arrays are the exception: they
are detected in every call, because with several devices XLA would crash the process.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.errors import ConfigError, did_you_mean, first_few, require
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, check_ids
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.padding import is_traced

if TYPE_CHECKING:
    from praxis_lite.core.partitioner.train_state import StateLayout

PyTree = Any


def checked_call(compiled: Callable[..., Any], check: Callable[..., None], *args: Any) -> Any:
    """Returns `compiled(*args)`, and calls `check` to explain errors that JAX raises.

    Args:
      compiled: A step, as returned by `jax.jit`.
      check: Called with the arguments; raises ConfigError if an argument is invalid.
      args: Arguments of the step, starting with its state or weights.
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
        # A step that fails while it runs also deletes its donated state, so look for the cause in
        # the message.
        if "deleted" in str(error):
            check(*args)
        raise


def check_tree(layout: "StateLayout", tree: PyTree, name: str, mesh: Mesh | None = None) -> None:
    """Checks that a tree has the structure, shapes and dtypes of a layout.

    Args:
      layout: Layout of a TrainState or of its mdl_vars.
      tree: Arrays or tracers with padded shapes.
      name: Name of the argument, such as "train_step: state".
      mesh: Mesh that the arrays must be on, or None to skip this check.

    Raises:
      ConfigError: The tree has the wrong type; leaves are missing or unknown; or a leaf has the
        wrong shape or dtype, is on the wrong devices, or is deleted. The message states what to
        pass.
    """
    check_type(layout, tree, name)
    expected = {leaf.path: leaf for leaf in layout.leaves()}
    actual = dict(leaves_with_path(tree, is_leaf=lambda x: x is None))
    missing, unknown = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected)
    if missing or unknown:
        lacks = f" lacks {first_few(missing)}" if missing else ""
        has = f"{' and' if missing else ''} has {first_few(unknown)}, which "
        has += f"{'is' if len(unknown) == 1 else 'are'} not in the model."
        near = did_you_mean(unknown[0], expected) if unknown else ""
        instead = "the complete tree that this Partitioner's init or steps return"
        if "params" not in tree and f"params/{next(iter(actual), '')}" in expected:
            instead, near = "the complete state.mdl_vars, not only its params", ""
        raise ConfigError(f"{name}{lacks}{has if unknown else '.'}{near} Pass {instead}.")
    for path, leaf in expected.items():
        _check_leaf(leaf, actual[path], f"{name}/{path}", mesh)


def check_type(layout: "StateLayout", tree: PyTree, name: str) -> None:
    """Raises ConfigError unless a tree has the type that the layout requires."""
    if type(tree) is not type(layout.shapes):
        raise ConfigError(f"{name} is {_described(tree)}; {_expected(layout.shapes, tree)}")


def check_batch(batch: Any, name: str, mesh: Mesh) -> None:
    """Raises ConfigError unless a batch is a GlobalBatch on the devices of the mesh."""
    if not isinstance(batch, GlobalBatch):
        raise ConfigError(
            f"{name} is {_described(batch)}; expected a GlobalBatch. Pass "
            "partitioner.global_batch(batch) for a dict of NumPy arrays."
        )
    for path, x in leaves_with_path(batch.inputs):
        _check_devices(x, f"{name}: {path}", mesh, "partitioner.global_batch(batch)")


def check_host_batch(inputs: Any, call: str, sizes: Mapping[str, int]) -> None:
    """Checks that a batch contains only numeric arrays, with ids in the model's range.

    Args:
      inputs: The batch.
      call: Name of the call, for messages.
      sizes: Maps the name of a leaf to its number of valid ids, as returned by `Task.num_ids`.

    Raises:
      ConfigError: The batch is already a GlobalBatch, is empty, contains a leaf that is not a
        numeric array, or contains an id that `check_ids` rejects.
    """
    check_spec(inputs, call)
    for path, x in leaves_with_path(inputs):
        require(
            x.dtype.kind not in "USOMm",
            f"{call}: the dtype of {path}",
            str(x.dtype),
            "numbers",
            "Use a tokenizer to convert text to ids.",
        )
    if isinstance(inputs, Mapping):
        check_ids(inputs, sizes, call)


def check_spec(spec: Any, call: str) -> None:
    """Raises ConfigError unless all leaves of a batch have a shape and a dtype."""
    if isinstance(spec, GlobalBatch):
        raise ConfigError(
            f"{call} was given a GlobalBatch; expected NumPy arrays or ShapeDtypeStructs. Pass the "
            "batch without converting it by global_batch."
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
    """Raises ConfigError unless a key is a `jax.random` key."""
    dtype = getattr(key, "dtype", None)
    is_raw = dtype == jnp.uint32 and key.shape[-1:] and key.ndim == 1
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.ndim == 0
    if not (is_raw or is_key or (may_be_none and key is None)):
        raise ConfigError(
            f"{name} is {_described(key)}; expected a jax.random key. Pass partitioner.key(seed) "
            "or partitioner.batch_key(seed, step, batch)."
        )


def _check_leaf(leaf: Any, actual: Any, name: str, mesh: Mesh | None) -> None:
    expected = f"{leaf.dtype.name} {leaf.padded_shape}"
    if not hasattr(actual, "shape") or not hasattr(actual, "dtype"):
        raise ConfigError(f"{name} is {_described(actual)}; expected an array, {expected}.")
    if _is_deleted(actual):
        raise ConfigError(
            f"{name} is deleted, because a train step donates its input state. Continue with the "
            "state that the step returned, or copy the state before the step with "
            "jax.tree.map(jnp.copy, state)."
        )
    if actual.shape != leaf.padded_shape:
        is_logical = actual.shape == leaf.shape
        hint = (
            "The array is not padded. Pass the result of this Partitioner's init or steps, or of "
            "layout.pad(...) in jax.jit."
            if is_logical
            else "It belongs to a different model, or to a Partitioner with a different mesh."
        )
        raise ConfigError(
            f"{name} has the shape {tuple(actual.shape)}; expected {expected}"
            f"{' (with padding)' if leaf.shape != leaf.padded_shape else ''}. {hint}"
        )
    require(
        actual.dtype == leaf.dtype,
        f"The dtype of {name}",
        str(actual.dtype),
        leaf.dtype.name,
        "Weights keep the dtype of init. To compute in a different dtype, set the model's "
        "fprop_dtype.",
    )
    if mesh is not None:
        _check_devices(actual, name, mesh, "the result of this Partitioner's init or steps")


def _check_devices(x: Any, name: str, mesh: Mesh, instead: str) -> None:
    # JAX moves uncommitted arrays to the devices of the computation.
    if not isinstance(x, jax.Array) or is_traced(x) or not x.committed:
        return
    devices, local = x.sharding.device_set, set(mesh.devices.flat)
    if devices != local:
        found, expected = (
            f"{count} {'device' if count == 1 else 'devices'}"
            for count in (len(devices), len(local))
        )
        raise ConfigError(
            f"{name} is on {'different devices' if found == expected else found}; expected this "
            f"Partitioner's mesh {dict(mesh.shape)} of {expected}. Pass {instead}."
        )
    if isinstance(x.sharding, NamedSharding) and dict(x.sharding.mesh.shape) != dict(mesh.shape):
        raise ConfigError(
            f"{name} is on the mesh {dict(x.sharding.mesh.shape)}; expected this Partitioner's "
            f"mesh {dict(mesh.shape)}. Pass {instead}."
        )


def _expected(expected: Any, actual: Any) -> str:
    if not isinstance(expected, Mapping):
        return "expected a TrainState: pass the result of init or of the previous step."
    if hasattr(actual, "mdl_vars"):
        return "expected the mdl_vars of a state: pass state.mdl_vars."
    return "expected a dict of params and non_trainable: pass state.mdl_vars."


def _is_list_of_numbers(x: Any) -> bool:
    # A list of arrays is a tree, but a list of Python numbers was probably meant as an array.
    return isinstance(x, list) and not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {first_few([str(name) for name in value])}" if value else "an empty dict"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array, {value.dtype} {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


def _is_deleted(tree: Any) -> bool:
    """Returns whether the first leaf, or the step of a TrainState, is a deleted array."""
    leaf = tree.step if hasattr(tree, "step") else next(iter(jax.tree.leaves(tree)), None)
    return isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted()
