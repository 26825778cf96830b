"""A Flax NNX module seen as plain nested dicts of arrays: split once, outside every step."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.models.layer_paths import naming_the_layer
from praxis_lite.weights import WeightSpec, spec_of

MdlVars = dict[str, Any]


class NnxModel:
    """The trees of a module: `{"params": nested dict, "non_trainable": nested dict}`.

    `nnx.Param` variables are "params", which a learner may touch; every other kind (statistics,
    counters) is "non_trainable", but for `nnx.Intermediate` (auxiliary losses, summaries), which
    is in neither: each `module` starts with zeros there.

    Args:
      build: called with `rngs`, returns the module; usually an `fdl.Partial` once built.
    """

    def __init__(self, build: Callable[..., nnx.Module]):
        self._build = build

    @functools.cached_property
    def _split(self) -> tuple[nnx.GraphDef, list[tuple[tuple, nnx.Variable]]]:
        """The module's structure and its abstract variables by path; no array is made."""
        with naming_the_layer():
            module = nnx.eval_shape(lambda: self._build(rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(module)
        return graphdef, list(nnx.to_flat_state(state))

    def init(self, key: jax.Array) -> MdlVars:
        """Returns freshly drawn variables, each at its true shape."""
        return mdl_vars_of(self._build(rngs=nnx.Rngs(key)))

    def weight_specs(self) -> MdlVars:
        """Returns the tree of `init` with a WeightSpec at each leaf."""
        kept = _kept(self._split[1])
        return _nested({path: spec_of(v) for path, v in kept.items()}, kept)

    def module(self, mdl_vars: MdlVars) -> nnx.Module:
        """Returns the module with `mdl_vars` in it: inside a step, while it is traced."""
        graphdef, variables = self._split
        flat = [
            (path, variable.replace(_leaf(mdl_vars, path, variable)))
            for path, variable in variables
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(flat))

    def abstract_module(self) -> nnx.Module:
        """Returns the module with shapes for arrays, for questions that need no weights."""
        graphdef, variables = self._split
        return nnx.merge(graphdef, nnx.from_flat_state(variables))


def mdl_vars_of(module: nnx.Module) -> MdlVars:
    """Returns a module's variables as plain nested dicts with string keys."""
    variables = _kept(nnx.to_flat_state(nnx.split(module)[1]))
    return _nested({path: v.get_value() for path, v in variables.items()}, variables)


def _kept(variables: Iterable[tuple[tuple, nnx.Variable]]) -> dict[tuple, nnx.Variable]:
    return {path: v for path, v in variables if not isinstance(v, nnx.Intermediate)}


def _collection(variable: nnx.Variable) -> str:
    return "params" if isinstance(variable, nnx.Param) else "non_trainable"


def _nested(values: dict[tuple, Any], variables: dict[tuple, nnx.Variable]) -> MdlVars:
    tree: MdlVars = {"params": {}, "non_trainable": {}}
    for path, value in values.items():
        node = tree[_collection(variables[path])]
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = value
    return tree


def _leaf(mdl_vars: MdlVars, path: tuple, variable: nnx.Variable) -> jax.Array:
    if isinstance(variable, nnx.Intermediate):
        return jnp.zeros(variable.shape, variable.dtype)
    node = mdl_vars[_collection(variable)]
    for part in path:
        node = node[str(part)]
    return node


def spec_leaves(weight_specs: MdlVars) -> list[tuple[str, WeightSpec]]:
    """Returns (path, WeightSpec) for each leaf of `NnxModel.weight_specs`."""
    leaves = jax.tree_util.tree_flatten_with_path(
        weight_specs, is_leaf=lambda x: isinstance(x, WeightSpec)
    )[0]
    return [(jax.tree_util.keystr(p, simple=True, separator="/"), spec) for p, spec in leaves]
