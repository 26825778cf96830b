"""A Flax NNX module seen as plain nested dicts of arrays: split once, outside every step."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.models.layer_paths import naming_the_layer
from praxis_lite.models.model import MdlVars, Model
from praxis_lite.sharding.gather import ShardedWeight
from praxis_lite.weights import spec_of


class NnxModel(Model):
    """A Flax NNX module.

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
        return mdl_vars_of(self._build(rngs=nnx.Rngs(key)))

    def weight_specs(self) -> MdlVars:
        kept = _kept(self._split[1])
        return _nested({path: spec_of(v) for path, v in kept.items()}, kept)

    def module(self, mdl_vars: MdlVars, key: jax.Array | None = None) -> nnx.Module:
        graphdef, variables = self._split
        flat = [
            (path, _with_value(variable, _leaf(mdl_vars, path, variable)))
            for path, variable in variables
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(flat))

    def non_trainable(self, module: nnx.Module) -> dict[str, Any]:
        return mdl_vars_of(module)["non_trainable"]

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


class _GatheredWhenRead(nnx.Param):
    """A weight of which this device has a block: a layer that reads it gets it whole."""

    def get_value(self, *, index: Any = ...) -> jax.Array:
        value = self.get_metadata("gather")(super().get_value())
        return value if index is ... else value[index]


def _with_value(variable: nnx.Variable, value: jax.Array | ShardedWeight) -> nnx.Variable:
    if isinstance(value, ShardedWeight):
        return _GatheredWhenRead(value.block, gather=value.gather, **variable.get_metadata())
    return variable.replace(value)


def _leaf(mdl_vars: MdlVars, path: tuple, variable: nnx.Variable) -> jax.Array:
    if isinstance(variable, nnx.Intermediate):
        return jnp.zeros(variable.shape, variable.dtype)
    node = mdl_vars[_collection(variable)]
    for part in path:
        node = node[str(part)]
    return node
