"""Plain functions as a model: `init(key)` returns the params, which are passed to a loss."""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import PartitionSpec

from praxis_lite.core.callables import check_takes, function_name
from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.models.model import MdlVars, Model, gather_sharded
from praxis_lite.core.sharding.leaf_paths import path_of
from praxis_lite.core.sharding.weight_spec import WeightSpec

PyTree = Any
Spec = PartitionSpec | tuple | None


class FunctionModel(Model):
    """A model whose params are the tree of float arrays that a function returns.

    All params are trained. Internally, the tree is stored as nested dicts. Names are dict keys (a
    "/" in a key starts a new level, as in Haiku), fields of named tuples and dataclasses, and
    indices of lists and tuples, such as "layers/0/w". `module` returns a tree with the structure
    that `init` returned.

    Pass arrays that are not trained to the loss with functools.partial. Statistics that a loss
    updates require a Flax model.

    Args:
      init: Takes a key, and returns params. Bind further arguments with functools.partial
        (fdl.Partial).
      specs: The mesh axes for weights: a tree like the params, a prefix of such a tree (as for the
        shardings passed to `jax.jit`), or a function that takes the params' shapes
        (jax.ShapeDtypeStructs) and returns such a tree. A leaf is a PartitionSpec or an equivalent
        tuple; dims without an entry are not split. If a leaf is None, the task's `weight_sharding`
        applies. If the params are a tuple or list, a tuple contains the specs of its entries.

    Raises:
      ConfigError: `init` requires more arguments than a key. Later, when the specs are read: `init`
        returns arrays that are not floats, or `specs` does not match the params.
    """

    def __init__(self, init: Callable[[jax.Array], PyTree], specs: Any = None):
        check_takes("FunctionModel.init", init, "key")
        self._init, self._specs = init, specs

    def __repr__(self) -> str:
        return f"FunctionModel({function_name(self._init)})"

    @functools.cached_property
    def _abstract(self) -> tuple[list[str], list[jax.ShapeDtypeStruct], Any]:
        """The paths, shapes and structure of the params, without arrays."""
        # Create the key inside, because creating it outside would trigger two compilations.
        shapes = jax.eval_shape(lambda: self._init_checked(jax.random.key(0)))
        leaves, structure = jax.tree.flatten_with_path(shapes)
        paths = [_path(path) for path, _ in leaves]
        _check_distinct(paths)
        return paths, [x for _, x in leaves], structure

    def _init_checked(self, key: jax.Array) -> PyTree:
        params, init = self._init(key), function_name(self._init)
        leaves = jax.tree.leaves_with_path(params)
        if not leaves:
            raise ConfigError(
                f"{init} returns no arrays ({type(params).__name__}); expected the params, a tree "
                "of float arrays. Is a `return` missing?"
            )
        for path, x in leaves:
            is_number = isinstance(x, jax.Array | np.ndarray | np.generic | float | int)
            if not (is_number and jnp.issubdtype(jnp.result_type(x), jnp.floating)):
                found = jnp.result_type(x) if is_number else type(x).__name__
                raise ConfigError(
                    f"params/{_path(path)}: {init} returns {found}, which has no gradient; "
                    "expected floats. Pass the value to the loss with functools.partial instead, "
                    "or make it a float and freeze it (Learner.bprop_variable_exclusion)."
                )
        return params

    def init(self, key: jax.Array) -> MdlVars:
        paths, shapes, _ = self._abstract
        leaves = jax.tree.leaves(self._init(key))
        # Convert Python numbers, because their weak types would not be preserved in a step.
        arrays = [jnp.asarray(x, s.dtype) for x, s in zip(leaves, shapes, strict=True)]
        return _mdl_vars(paths, arrays)

    def weight_specs(self) -> MdlVars:
        paths, shapes, structure = self._abstract
        params, specs = jax.tree.unflatten(structure, shapes), self._specs
        declared = _spec_of_leaves(params, specs(params) if callable(specs) else specs, "")
        weight_specs = [
            WeightSpec(
                x.shape,
                x.dtype,
                split_dims_mapping=None if spec is None else tuple(spec),
                declared_by="" if spec is None else f"specs {tuple(spec)}",
            )
            for x, spec in zip(shapes, declared, strict=True)
        ]
        return _mdl_vars(paths, weight_specs)

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> PyTree:
        """Returns the params with the tree structure from `init`; the keys are ignored."""
        paths, _, structure = self._abstract
        params = traverse_util.flatten_dict(gather_sharded(mdl_vars["params"]), sep="/")
        return jax.tree.unflatten(structure, [params[path] for path in paths])

    def non_trainable(self, module: PyTree) -> dict[str, Any]:
        return {}


def _spec_of_leaves(params: PyTree, specs: Any, path: str) -> Iterator[Spec]:
    """Yields the spec of each leaf of `params`; `specs` is a tree like `params`, or a prefix."""
    num_leaves = len(jax.tree.leaves(params))
    is_array = jax.tree_util.all_leaves([params])
    is_spec = specs is None or isinstance(specs, PartitionSpec)
    # One spec applies to all leaves below it. For an array or a dict, a tuple cannot be a tree, so
    # it must be a spec.
    if is_spec or (isinstance(specs, tuple) and (is_array or isinstance(params, Mapping))):
        yield from [specs] * num_leaves
    elif num_leaves:
        if is_array or jax.tree_util.all_leaves([specs]):
            axes = "or a tuple of mesh axes" if is_array else "or a tree like the params"
            raise ConfigError(
                f"specs has {specs!r} at {_where(path)}, but the params have {_kind(params)} "
                f"there; expected a PartitionSpec, None {axes}."
            )
        # Both are trees here. Compare their names, and descend.
        children, child_specs = _children(params), _children(specs)
        for name in child_specs:
            if name not in children:
                raise ConfigError(
                    f"specs has an entry '{_join(path, name)}', but at {_where(path)} the params "
                    f"have only {_kind(params)}.{did_you_mean(name, children)} Rename or remove it."
                )
        for name, child in children.items():
            if name not in child_specs and jax.tree.leaves(child):
                raise ConfigError(
                    f"specs has no entry for '{_join(path, name)}'. Add a spec, or None for "
                    "weights without one."
                )
            yield from _spec_of_leaves(child, child_specs.get(name), _join(path, name))


def _children(node: PyTree) -> dict[str, PyTree]:
    children = jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node)
    return {jax.tree_util.keystr(key, simple=True): child for key, child in children}


def _kind(params: PyTree) -> str:
    if hasattr(params, "shape"):
        return f"an array of shape {tuple(params.shape)}"
    return f"a {type(params).__name__} of {', '.join(map(repr, _children(params)))}"


def _where(path: str) -> str:
    return repr(path) if path else "the root"


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _path(path: tuple) -> str:
    # A single array has no path.
    return path_of(path) or "value"


def _check_distinct(paths: list[str]) -> None:
    """Raises ConfigError if two entries have the same path, or one entry is inside another."""
    counts = collections.Counter(paths)
    for path in paths:
        parts = path.split("/")
        parents = ("/".join(parts[:n]) for n in range(1, len(parts)))
        if counts[path] > 1 or any(parent in counts for parent in parents):
            raise ConfigError(
                f"params/{path} is the path of more than one entry: a '/' in a key starts a new "
                "level, and the keys 1 and '1' have the same path. Rename one of the entries."
            )


def _mdl_vars(paths: list[str], leaves: list[Any]) -> MdlVars:
    params = traverse_util.unflatten_dict(dict(zip(paths, leaves, strict=True)), sep="/")
    return {"params": params, "non_trainable": {}}
